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
                    "the number of checksums does not fit the file: " +
                        std::to_string(file.checksums.size()) + " for " + std::to_string(blocks) + " blocks");
}

// In an order in which nothing overflows.
bool Fits(const ReadRun& run, uint64_t data_bytes) {
  if (run.piece_bytes > data_bytes) return false;
  const uint64_t room = data_bytes - run.piece_bytes;
  if (run.pieces > 1 && (run.file_step < run.piece_bytes || run.pieces - 1 > room / run.file_step)) {
    return false;
  }
  return run.offset <= room - (run.pieces > 1 ? (run.pieces - 1) * run.file_step : 0);
}

void CheckRun(const ReadRun& run, const std::vector<ReadFile>& files) {
  if (run.file >= files.size()) {
    throw Failure("plan reads", "", 0,
                  "run of file " + std::to_string(run.file) + ", which is none of the " +
                      std::to_string(files.size()) + " given");
  }
  const ReadFile& file = files[run.file];
  if (Fits(run, file.data_bytes)) return;
  throw FileFailure(
      "plan reads", file.path, 0,
      "a run of " + std::to_string(run.pieces) + " pieces of " + std::to_string(run.piece_bytes) +
          " bytes, " + std::to_string(run.file_step) + " apart from offset " + std::to_string(run.offset) +
          " on, overlaps itself or leaves the " + std::to_string(file.data_bytes) + " bytes of data");
}

// Pieces that touch on both sides are one.
void Simplify(ReadRun* run) {
  if (run->pieces > 1 && run->file_step == run->piece_bytes && run->target_step == run->piece_bytes) {
    run->piece_bytes *= run->pieces;
    run->pieces = 1;
  }
  if (run->pieces == 1) run->file_step = run->target_step = run->piece_bytes;
}

// What has to be read of a file for a run, in multiples of `unit`; less than kReadGapBytes is not left out.
void AddRanges(const ReadRun& run, uint64_t unit, uint64_t data_bytes, std::vector<Range>* ranges) {
  const bool dense = run.file_step - run.piece_bytes <= kReadGapBytes;
  const uint64_t steps = dense ? 1 : run.pieces;
  for (uint64_t i = 0; i < steps; ++i) {
    const uint64_t from = run.offset + i * run.file_step;
    const uint64_t to = dense ? run.end() : from + run.piece_bytes;
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

ReadPlan::ReadPlan(std::vector<ReadFile> files, std::vector<ReadRun> runs, uint64_t window_bytes)
    : files_(std::move(files)), runs_(std::move(runs)) {
  for (const ReadFile& file : files_) CheckFile(file);
  runs_.erase(std::remove_if(runs_.begin(), runs_.end(),
                             [](const ReadRun& run) { return run.piece_bytes == 0 || run.pieces == 0; }),
              runs_.end());
  for (ReadRun& run : runs_) {
    CheckRun(run, files_);
    Simplify(&run);
  }
  std::sort(runs_.begin(), runs_.end(), [](const ReadRun& a, const ReadRun& b) {
    return std::pair(a.file, a.offset) < std::pair(b.file, b.offset);
  });
  for (size_t first = 0, end; first < runs_.size(); first = end) {
    end = first;
    while (end < runs_.size() && runs_[end].file == runs_[first].file) ++end;
    CutFile(runs_[first].file, first, end, window_bytes);
  }
}

void ReadPlan::CutFile(size_t file, size_t first_run, size_t end_run, uint64_t window_bytes) {
  const uint64_t unit = files_[file].checksums.empty() ? kAlignment : kBlockBytes;
  std::vector<Range> ranges;
  std::vector<uint64_t> reach;  // the furthest end of the runs up to each: ascending
  for (size_t i = first_run; i < end_run; ++i) {
    AddRanges(runs_[i], unit, files_[file].data_bytes, &ranges);
    reach.push_back(std::max(reach.empty() ? 0 : reach.back(), runs_[i].end()));
  }
  std::sort(ranges.begin(), ranges.end());
  const auto first = runs_.begin() + static_cast<ptrdiff_t>(first_run);
  const auto end = runs_.begin() + static_cast<ptrdiff_t>(end_run);
  for (size_t i = 0; i < ranges.size();) {
    auto [at, stop] = ranges[i++];
    while (i < ranges.size() && ranges[i].first <= stop + kReadGapBytes) {
      stop = std::max(stop, ranges[i++].second);
    }
    for (; at < stop; at += window_bytes) {
      Window window{file, at, std::min(at + window_bytes, stop), 0, 0};
      const auto reaching = std::upper_bound(reach.begin(), reach.end(), window.begin);
      const auto behind = std::lower_bound(
          first, end, window.end, [](const ReadRun& run, uint64_t offset) { return run.offset < offset; });
      window.first_run = first_run + static_cast<size_t>(reaching - reach.begin());
      window.end_run = static_cast<size_t>(behind - runs_.begin());
      windows_.push_back(window);
    }
  }
}

bool ReadPlan::has_device_targets() const {
  return std::any_of(runs_.begin(), runs_.end(), [](const ReadRun& run) { return run.device; });
}

}  // namespace datastates
