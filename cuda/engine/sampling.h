// Where the sources of a save are sampled (engine/tripwire.h): at places that are chosen anew at each save,
// so that a small change that comes again and again is found in the end.
//
// Host memory has one sample in each span and in each chunk of a span, at a random place: a tenth of a
// microsecond of the trainer's time each. On a device a copy costs the trainer's thread microseconds, so
// there are no more than kMostDeviceCopies for a save. Some of them are grids: one copy of many rows at equal
// distances. Those go to large spans, in proportion to their bytes; the others go to spans one by one, evenly
// spread where there are more spans than that. With the copies in flight (device/copier.h) they stay below
// what a stream accepts.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "engine/span.h"

namespace datastates {

constexpr uint64_t kSampleBytes = 64;
constexpr size_t kMostDeviceCopies = 256;
constexpr size_t kMostGrids = 16;
constexpr size_t kRowsPerGrid = 128;  // of a span with a 1/kMostGrids of all bytes
constexpr uint64_t kLeastRowStep = 4096;
constexpr uint64_t kLeastGridBytes = 64 * kLeastRowStep;
constexpr size_t kMostDeviceSamples = kMostDeviceCopies + kMostGrids * kRowsPerGrid;

// A few bytes of a lazy source, which are copied at once and again with the rest of it.
struct Sample {
  uint64_t source;
  uint64_t offset;  // in the file
  uint32_t bytes;   // kSampleBytes, or the whole row of a span if it has less
  uint32_t place;   // counted among the samples of the host, or of the device
  bool device;
};

// Samples of kSampleBytes on a device that one copy takes.
struct Grid {
  uint64_t source;
  uint64_t row_step;
  uint32_t rows;
  uint32_t place;  // of the first; the others follow
};

struct Samples {
  std::vector<Sample> all;  // in the order of the file
  size_t host = 0;          // how many are of host memory
  std::vector<Grid> grids;  // of the device's samples; the others are copied one by one
};

// A number that looks random, and is the same for the same two.
inline uint64_t Scatter(uint64_t seed, uint64_t number) {
  const auto mix = [](uint64_t x) {  // splitmix64 (Steele, Lea, Flood 2014)
    x += 0x9e3779b97f4a7c15;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9;
    x = (x ^ (x >> 27)) * 0x94d049bb133111eb;
    return x ^ (x >> 31);
  };
  return mix(mix(seed) + number);
}

// The bytes around a random one of the file's [begin, end), which the span covers; they are of one row.
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

// Of the lazy ones of `spans`. Chunks are counted from the file's `begin`.
Samples ChooseSamples(const std::vector<Span>& spans, uint64_t begin, uint64_t chunk_bytes, uint64_t seed);

}  // namespace datastates
