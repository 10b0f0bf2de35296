#include "engine/sampling.h"

namespace datastates {
namespace {

bool IsSampled(const Span& span) { return !span.eager && span.bytes != 0; }

bool MayHaveGrid(const Span& span) {
  return span.device && span.row_bytes == span.bytes && span.bytes >= kLeastGridBytes;
}

// Returns how many grids' worth of rows each span gets: kMostGrids points, equally spaced over the bytes of
// all spans that may have a grid, are counted in each. The first point is random.
std::vector<size_t> ShareGrids(const std::vector<Span>& spans, uint64_t seed) {
  uint64_t total = 0;
  for (const Span& span : spans) total += IsSampled(span) && MayHaveGrid(span) ? span.bytes : 0;
  std::vector<size_t> shares(spans.size(), 0);
  if (total == 0) return shares;
  const uint64_t step = total / kMostGrids + 1;
  uint64_t point = Scatter(seed, 0) % step, before = 0;
  for (size_t i = 0; i < spans.size(); ++i) {
    if (!IsSampled(spans[i]) || !MayHaveGrid(spans[i])) continue;
    before += spans[i].bytes;
    for (; point < before; point += step) ++shares[i];
  }
  return shares;
}

// Selects the device spans without a grid that get a sample: one at random from each of up to `most` groups
// of neighbours.
class Chosen {
 public:
  Chosen(size_t spans, size_t most, uint64_t seed)
      : spans_(spans), groups_(std::min(spans, most)), seed_(seed) {}

  bool Next() {  // called once for each span, in order
    const size_t number = next_++, group = group_;
    const size_t begin = group * spans_ / groups_, end = (group + 1) * spans_ / groups_;
    if (next_ == end) ++group_;
    return number == begin + Scatter(seed_, group) % (end - begin);
  }

 private:
  const size_t spans_, groups_;
  const uint64_t seed_;
  size_t next_ = 0, group_ = 0;
};

class Choice {
 public:
  Choice(uint64_t begin, uint64_t chunk_bytes, uint64_t seed)
      : begin_(begin), chunk_bytes_(chunk_bytes), seed_(seed) {}

  void InHostMemory(const Span& span) {
    const uint64_t end = span.offset + span.bytes;
    for (uint64_t from = span.offset; from < end;) {
      const uint64_t to = std::min(end, begin_ + ((from - begin_) / chunk_bytes_ + 1) * chunk_bytes_);
      Add(SampleIn(span, from, to, seed_), &host_);
      from = to;
    }
  }

  void OnDevice(const Span& span) {
    Add(SampleIn(span, span.offset, span.offset + span.bytes, seed_), &device_);
  }

  // The number of rows varies, and so does their distance: a pattern that repeats within a tensor cannot
  // escape every save.
  void AsGrid(const Span& span, size_t share) {
    const uint64_t most = share * kRowsPerGrid - Scatter(seed_, span.offset) % (share * kRowsPerGrid / 8);
    const uint64_t rows = std::min(most, span.bytes / kLeastRowStep);
    const uint64_t step = span.bytes / rows;
    const uint64_t room = span.bytes - (rows - 1) * step - kSampleBytes;
    const uint64_t first = Scatter(seed_, span.offset + 1) % (room + 1);
    found_.grids.push_back({span.source + first, step, static_cast<uint32_t>(rows), device_});
    for (uint64_t at = first, row = 0; row < rows; ++row, at += step) {
      Add({span.source + at, span.offset + at, kSampleBytes, 0, true}, &device_);
    }
  }

  Samples Take() {
    found_.host = host_;
    return std::move(found_);
  }

 private:
  void Add(Sample sample, uint32_t* place) {
    sample.place = (*place)++;
    found_.all.push_back(sample);
  }

  const uint64_t begin_, chunk_bytes_, seed_;
  uint32_t host_ = 0, device_ = 0;
  Samples found_;
};

}  // namespace

Samples ChooseSamples(const std::vector<Span>& spans, uint64_t begin, uint64_t chunk_bytes, uint64_t seed) {
  const std::vector<size_t> shares = ShareGrids(spans, seed);
  size_t singles = 0, grids = 0;
  for (size_t i = 0; i < spans.size(); ++i) {
    grids += shares[i] != 0;
    singles += IsSampled(spans[i]) && spans[i].device && shares[i] == 0;
  }
  Chosen chosen(singles, kMostDeviceCopies - grids, seed);
  Choice choice(begin, chunk_bytes, seed);
  for (size_t i = 0; i < spans.size(); ++i) {
    const Span& span = spans[i];
    if (!IsSampled(span)) continue;
    if (!span.device) {
      choice.InHostMemory(span);
    } else if (shares[i] != 0) {
      choice.AsGrid(span, shares[i]);
    } else if (chosen.Next()) {
      choice.OnDevice(span);
    }
  }
  return choice.Take();
}

}  // namespace datastates
