#include "engine/read_plan.h"

#include <utility>

#include "engine/block.h"
#include "os/aligned.h"

namespace datastates {
namespace {

using Range = std::pair<uint64_t, uint64_t>;  // begin, end

void CheckFile(const ReadFile& file) {
  const uint64_t blocks = AlignUp(file.data_bytes, kBlockBytes) / kBlockBytes;
  if (file.checksums.empty() || file.checksums.size() == blocks) return;
  throw FileFailure("plan reads", file.path, 0,
                    "the number of checksums does not match the file: found " +
                        std::to_string(file.checksums.size()) + ", expected one for each of its " +
                        std::to_string(blocks) + " blocks");
}

// The tests are in an order in which nothing overflows.
bool Fits(const ReadSpan& span, uint64_t data_bytes) {
  if (span.row_bytes > data_bytes) return false;
  const uint64_t room = data_bytes - span.row_bytes;
  if (span.rows > 1 && (span.file_step < span.row_bytes || span.rows - 1 > room / span.file_step)) {
    return false;
  }
  return span.offset <= room - (span.rows > 1 ? (span.rows - 1) * span.file_step : 0);
}

void CheckSpan(const ReadSpan& span, const std::vector<ReadFile>& files) {
  if (span.file >= files.size()) {
    throw Failure("plan reads", "", 0,
                  "span of file " + std::to_string(span.file) + ": expected a file number below " +
                      std::to_string(files.size()));
  }
  const ReadFile& file = files[span.file];
  if (Fits(span, file.data_bytes)) return;
  throw FileFailure("plan reads", file.path, 0,
                    "a span of " + std::to_string(span.rows) + " rows of " + std::to_string(span.row_bytes) +
                        " bytes, " + std::to_string(span.file_step) + " apart from offset " +
                        std::to_string(span.offset) + " on, overlaps itself or leaves the " +
                        std::to_string(file.data_bytes) + " bytes of data");
}

// Merges rows that touch both in the file and in memory into one.
void Simplify(ReadSpan* span) {
  if (span->rows > 1 && span->file_step == span->row_bytes && span->target_step == span->row_bytes) {
    span->row_bytes *= span->rows;
    span->rows = 1;
  }
  if (span->rows == 1) span->file_step = span->target_step = span->row_bytes;
}

// Adds the ranges of the file that a span needs, in multiples of `unit`. Holes of up to kReadGapBytes are
// read.
void AddRanges(const ReadSpan& span, uint64_t unit, uint64_t data_bytes, std::vector<Range>* ranges) {
  const bool dense = span.file_step - span.row_bytes <= kReadGapBytes;
  const uint64_t steps = dense ? 1 : span.rows;
  for (uint64_t i = 0; i < steps; ++i) {
    const uint64_t from = span.offset + i * span.file_step;
    const uint64_t to = dense ? span.end() : from + span.row_bytes;
    const Range range{from / unit * unit, std::min(AlignUp(to, unit), data_bytes)};
    if (ranges->empty() || range.first < ranges->back().first ||
        range.first > ranges->back().second + kReadGapBytes) {
      ranges->push_back(range);
    } else {
      ranges->back().second = std::max(ranges->back().second, range.second);
    }
  }
}

}  // namespace

ReadPlan::ReadPlan(std::vector<ReadFile> files, std::vector<ReadSpan> spans, uint64_t window_bytes)
    : files_(std::move(files)), spans_(std::move(spans)) {
  for (const ReadFile& file : files_) CheckFile(file);
  spans_.erase(std::remove_if(spans_.begin(), spans_.end(),
                              [](const ReadSpan& span) { return span.row_bytes == 0 || span.rows == 0; }),
               spans_.end());
  for (ReadSpan& span : spans_) {
    CheckSpan(span, files_);
    Simplify(&span);
  }
  std::sort(spans_.begin(), spans_.end(), [](const ReadSpan& a, const ReadSpan& b) {
    return std::pair(a.file, a.offset) < std::pair(b.file, b.offset);
  });
  for (size_t first = 0, end; first < spans_.size(); first = end) {
    end = first;
    while (end < spans_.size() && spans_[end].file == spans_[first].file) ++end;
    CutFile(spans_[first].file, first, end, window_bytes);
  }
}

void ReadPlan::CutFile(size_t file, size_t first_span, size_t end_span, uint64_t window_bytes) {
  const uint64_t unit = files_[file].checksums.empty() ? kAlignment : kBlockBytes;
  std::vector<Range> ranges;
  std::vector<uint64_t> reach;  // the furthest end of the spans up to each: ascending
  for (size_t i = first_span; i < end_span; ++i) {
    AddRanges(spans_[i], unit, files_[file].data_bytes, &ranges);
    reach.push_back(std::max(reach.empty() ? 0 : reach.back(), spans_[i].end()));
  }
  std::sort(ranges.begin(), ranges.end());
  const auto first = spans_.begin() + static_cast<ptrdiff_t>(first_span);
  const auto end = spans_.begin() + static_cast<ptrdiff_t>(end_span);
  for (size_t i = 0; i < ranges.size();) {
    auto [at, stop] = ranges[i++];
    while (i < ranges.size() && ranges[i].first <= stop + kReadGapBytes) {
      stop = std::max(stop, ranges[i++].second);
    }
    for (; at < stop; at += window_bytes) {
      Window window{file, at, std::min(at + window_bytes, stop), 0, 0};
      const auto reaching = std::upper_bound(reach.begin(), reach.end(), window.begin);
      const auto past_end = std::lower_bound(
          first, end, window.end, [](const ReadSpan& span, uint64_t offset) { return span.offset < offset; });
      window.first_span = first_span + static_cast<size_t>(reaching - reach.begin());
      window.end_span = static_cast<size_t>(past_end - spans_.begin());
      windows_.push_back(window);
    }
  }
}

bool ReadPlan::has_device_targets() const {
  return std::any_of(spans_.begin(), spans_.end(), [](const ReadSpan& span) { return span.device; });
}

}  // namespace datastates
