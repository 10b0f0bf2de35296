// What to copy where: the plan of one contiguous stretch of a data file, cut into slot-sized chunks.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>

#include "common.h"

namespace datastates {

// Pieces of memory at equal distances, the first at `source`, become the file's bytes at `offset`, one after
// the other. One piece, or pieces that touch, are contiguous memory.
struct Run {
  uint64_t source;
  uint64_t bytes;  // of all pieces together
  uint64_t offset;
  uint64_t piece_bytes;  // divides `bytes`
  uint64_t step_bytes;   // from piece to piece: anything, also zero
  uint64_t storage;      // only runs with the same one are merged; any number names it
  bool eager;            // must be staged before the trainer goes on at all
  bool device;           // `source` is device memory
};

constexpr uint64_t kSampleBytes = 64;
constexpr size_t kMostDeviceSamples = 256;

// A few bytes of a lazy source, which are copied at once and again with the rest of it: see Tripwire.
struct Sample {
  uint64_t source;
  uint64_t offset;  // in the file
  uint32_t bytes;   // kSampleBytes, or the whole piece of a run if it has less
  uint32_t place;   // counted among the samples of the host, or of the device
  bool device;
};

class Batch {
 public:
  // `runs` are ordered by offset, do not overlap and lie in [begin, end); `begin` and `end` are
  // multiples of kAlignment. Neighbours in memory and in the file become one run if they are of one storage:
  // a device's driver refuses a copy that leaves an allocation, also where the next one follows at once
  // (torch gives blocks of 10 MiB and more allocations of their own). Throws Failure.
  // `fenced`: the sources may change at the next fence, so the fence waits for this batch.
  Batch(uint64_t begin, uint64_t end, uint64_t chunk_bytes, bool fenced, std::vector<Run> runs);

  struct Chunk {
    uint64_t offset;   // in the file
    uint64_t bytes;    // a multiple of kAlignment
    size_t first_run;  // the first run with bytes in this chunk
    bool eager;        // holds bytes of an eager run
    bool device;       // holds bytes of a run on a device
  };

  const std::vector<Chunk>& chunks() const { return chunks_; }
  const std::vector<Run>& runs() const { return runs_; }
  // Of the lazy runs of a fenced batch, in the order of the file. Every run as it was given has one at its
  // end, which is copied last and so the likeliest to be torn. In host memory, where a sample costs a
  // tenth of a microsecond, each chunk that a run reaches beyond has one more at its end. On a device, where
  // one costs microseconds and the trainer's thread enqueues them, no more than kMostDeviceSamples are kept,
  // evenly spread: with the copies in flight (device/copier.h) they stay below what a stream accepts.
  const std::vector<Sample>& samples() const { return samples_; }
  bool fenced() const { return fenced_; }

  // Calls copy(target, run, source, bytes, pieces) for all of a run that is in the chunk: `pieces` pieces of
  // `bytes`, run.step_bytes apart from `source` on, go to `target` one behind the other. A chunk's border may
  // cut a piece, so there are up to three calls a run. Zeroes the gaps between runs. `target` is the chunk's
  // slot.
  template <typename Copy>
  void Fill(const Chunk& chunk, uint8_t* target, Copy copy) const;

 private:
  std::vector<Sample> samples_;  // constant after construction
  std::vector<Run> runs_;        // constant after construction
  std::vector<Chunk> chunks_;    // constant after construction
  const bool fenced_;
};

template <typename Copy>
void Batch::Fill(const Chunk& chunk, uint8_t* target, Copy copy) const {
  uint64_t at = chunk.offset;
  const uint64_t end = chunk.offset + chunk.bytes;
  for (size_t i = chunk.first_run; i < runs_.size() && runs_[i].offset < end; ++i) {
    const Run& run = runs_[i];
    const uint64_t from = run.offset > chunk.offset ? run.offset : chunk.offset;
    const uint64_t to = run.offset + run.bytes < end ? run.offset + run.bytes : end;
    if (from >= to) continue;
    if (from > at) std::memset(target + (at - chunk.offset), 0, from - at);
    for (at = from; at < to;) {
      const uint64_t piece = (at - run.offset) / run.piece_bytes;
      const uint64_t cut_off = (at - run.offset) % run.piece_bytes;
      const uint64_t bytes = std::min(run.piece_bytes - cut_off, to - at);
      const uint64_t pieces = bytes == run.piece_bytes ? (to - at) / bytes : 1;
      copy(target + (at - chunk.offset), run, run.source + piece * run.step_bytes + cut_off, bytes, pieces);
      at += pieces * bytes;
    }
  }
  if (at < end) std::memset(target + (at - chunk.offset), 0, end - at);
}

}  // namespace datastates
