#include "engine/sampling.h"

namespace datastates {
namespace {

bool IsSampled(const Run& run) { return !run.eager && run.bytes != 0; }

bool MayHaveGrid(const Run& run) {
  return run.device && run.piece_bytes == run.bytes && run.bytes >= kLeastGridBytes;
}

// How many grids' worth of rows each run gets: kMostGrids points at equal distances over the bytes of all
// runs that may have one, from a random first.
std::vector<size_t> ShareGrids(const std::vector<Run>& runs, uint64_t seed) {
  uint64_t total = 0;
  for (const Run& run : runs) total += IsSampled(run) && MayHaveGrid(run) ? run.bytes : 0;
  std::vector<size_t> shares(runs.size(), 0);
  if (total == 0) return shares;
  const uint64_t step = total / kMostGrids + 1;
  uint64_t point = Scatter(seed, 0) % step, before = 0;
  for (size_t i = 0; i < runs.size(); ++i) {
    if (!IsSampled(runs[i]) || !MayHaveGrid(runs[i])) continue;
    before += runs[i].bytes;
    for (; point < before; point += step) ++shares[i];
  }
  return shares;
}

// Which runs of the device have a sample of their own, beside those with grids: one of each of as many groups
// of neighbours as there may be.
class Chosen {
 public:
  Chosen(size_t runs, size_t most, uint64_t seed) : runs_(runs), groups_(std::min(runs, most)), seed_(seed) {}

  bool Next() {  // asked for each run, in order
    const size_t number = next_++, group = group_;
    const size_t begin = group * runs_ / groups_, end = (group + 1) * runs_ / groups_;
    if (next_ == end) ++group_;
    return number == begin + Scatter(seed_, group) % (end - begin);
  }

 private:
  const size_t runs_, groups_;
  const uint64_t seed_;
  size_t next_ = 0, group_ = 0;
};

class Choice {
 public:
  Choice(uint64_t begin, uint64_t chunk_bytes, uint64_t seed)
      : begin_(begin), chunk_bytes_(chunk_bytes), seed_(seed) {}

  void InHostMemory(const Run& run) {
    const uint64_t end = run.offset + run.bytes;
    for (uint64_t from = run.offset; from < end;) {
      const uint64_t to = std::min(end, begin_ + ((from - begin_) / chunk_bytes_ + 1) * chunk_bytes_);
      Add(SampleIn(run, from, to, seed_), &host_);
      from = to;
    }
  }

  void OnDevice(const Run& run) { Add(SampleIn(run, run.offset, run.offset + run.bytes, seed_), &device_); }

  // The number of rows varies, and with it their distance: what repeats in a tensor at some distance of its
  // own is not always missed.
  void AsGrid(const Run& run, size_t share) {
    const uint64_t most = share * kRowsPerGrid - Scatter(seed_, run.offset) % (share * kRowsPerGrid / 8);
    const uint64_t rows = std::min(most, run.bytes / kLeastRowStep);
    const uint64_t step = run.bytes / rows;
    const uint64_t room = run.bytes - (rows - 1) * step - kSampleBytes;
    const uint64_t first = Scatter(seed_, run.offset + 1) % (room + 1);
    found_.grids.push_back({run.source + first, step, static_cast<uint32_t>(rows), device_});
    for (uint64_t at = first, row = 0; row < rows; ++row, at += step) {
      Add({run.source + at, run.offset + at, kSampleBytes, 0, true}, &device_);
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

Samples ChooseSamples(const std::vector<Run>& runs, uint64_t begin, uint64_t chunk_bytes, uint64_t seed) {
  const std::vector<size_t> shares = ShareGrids(runs, seed);
  size_t singles = 0, grids = 0;
  for (size_t i = 0; i < runs.size(); ++i) {
    grids += shares[i] != 0;
    singles += IsSampled(runs[i]) && runs[i].device && shares[i] == 0;
  }
  Chosen chosen(singles, kMostDeviceCopies - grids, seed);
  Choice choice(begin, chunk_bytes, seed);
  for (size_t i = 0; i < runs.size(); ++i) {
    const Run& run = runs[i];
    if (!IsSampled(run)) continue;
    if (!run.device) {
      choice.InHostMemory(run);
    } else if (shares[i] != 0) {
      choice.AsGrid(run, shares[i]);
    } else if (chosen.Next()) {
      choice.OnDevice(run);
    }
  }
  return choice.Take();
}

}  // namespace datastates
