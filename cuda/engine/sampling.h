// Chooses where the sources of a save are sampled (engine/tripwire.h). Pure planning. The places differ from
// save to save, so that a small change that recurs is found eventually.
//
// Host memory: one sample at a random place in each part of a span that falls into one chunk, each costing
// the trainer a tenth of a microsecond. Device memory: a copy costs the trainer's thread microseconds, so a
// save makes at most kMostDeviceCopies. Some of them are grids, single copies of many rows at equal
// distances, which go to large spans in proportion to their bytes. The rest go to one span each, evenly
// spread if there are more spans. With the copies in flight (device/copier.h) they stay below what a stream
// accepts.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "engine/span.h"

namespace datastates {

constexpr uint64_t kSampleBytes = 64;
constexpr size_t kMostDeviceCopies = 128;
constexpr size_t kMostGrids = 16;
constexpr size_t kRowsPerGrid = 128;  // for a span with 1/kMostGrids of all bytes
constexpr uint64_t kLeastRowStep = 4096;
constexpr uint64_t kLeastGridBytes = 64 * kLeastRowStep;
constexpr size_t kMostDeviceSamples = kMostDeviceCopies + kMostGrids * kRowsPerGrid;

// A few bytes of a lazy source that are copied when the save begins, and again with the rest of the source.
struct Sample {
  uint64_t source;
  uint64_t offset;  // in the file
  uint32_t bytes;   // kSampleBytes, or a whole row if that is shorter
  uint32_t place;   // index among the samples of the host, or of the device
  bool device;
};

// Device samples of kSampleBytes each that one copy takes.
struct Grid {
  uint64_t source;
  uint64_t row_step;
  uint32_t rows;
  uint32_t place;  // of the first; the others follow
};

struct Samples {
  std::vector<Sample> all;  // in the order of the file
  size_t host = 0;          // the number of samples in host memory
  std::vector<Grid> grids;  // device samples outside them are copied one by one
};

// Returns a pseudo-random number that depends on the arguments alone.
inline uint64_t Scatter(uint64_t seed, uint64_t number) {
  const auto mix = [](uint64_t x) {  // splitmix64 (Steele, Lea, Flood 2014)
    x += 0x9e3779b97f4a7c15;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9;
    x = (x ^ (x >> 27)) * 0x94d049bb133111eb;
    return x ^ (x >> 31);
  };
  return mix(mix(seed) + number);
}

// Returns a sample around a random byte of the file's [begin, end), which the span covers. It lies in one
// row.
inline Sample SampleIn(const Span& span, uint64_t begin, uint64_t end, uint64_t seed) {
  const uint64_t middle = begin + Scatter(seed, begin) % (end - begin);
  const uint64_t row = (middle - span.offset) / span.row_bytes;
  const uint64_t row_begin = span.offset + row * span.row_bytes;
  const uint64_t low = std::max(begin, row_begin), high = std::min(end, row_begin + span.row_bytes);
  const uint64_t bytes = std::min(kSampleBytes, high - low);
  const uint64_t before = std::min(kSampleBytes / 2, middle - low);
  const uint64_t offset = std::min(middle - before, high - bytes);
  return {span.source + row * span.row_step + (offset - row_begin), offset, static_cast<uint32_t>(bytes), 0,
          span.device};
}

// Chooses samples of the lazy spans. `begin` is where the first chunk starts in the file.
Samples ChooseSamples(const std::vector<Span>& spans, uint64_t begin, uint64_t chunk_bytes, uint64_t seed);

}  // namespace datastates
