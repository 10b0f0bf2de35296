// What to copy where: the plan of one contiguous stretch of a data file, cut into slot-sized chunks.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>

#include "common.h"
#include "engine/sampling.h"
#include "engine/span.h"

namespace datastates {

class Batch {
 public:
  // `spans` are ordered by offset, do not overlap and lie in [begin, end); `begin` and `end` are
  // multiples of kAlignment. Neighbours in memory and in the file become one span if they are of one storage:
  // a device's driver refuses a copy that leaves an allocation, also where the next one follows at once
  // (torch gives blocks of 10 MiB and more allocations of their own). Throws Failure.
  // `fenced`: the sources may change at the next fence, so the fence waits for this batch, and `seed` says
  // where they are sampled.
  Batch(uint64_t begin, uint64_t end, uint64_t chunk_bytes, bool fenced, std::vector<Span> spans,
        uint64_t seed);

  struct Chunk {
    uint64_t offset;    // in the file
    uint64_t bytes;     // a multiple of kAlignment
    size_t first_span;  // the first span with bytes in this chunk
    bool eager;         // holds bytes of an eager span
    bool device;        // holds bytes of a span on a device
  };

  const std::vector<Chunk>& chunks() const { return chunks_; }
  const std::vector<Span>& spans() const { return spans_; }
  // Of a fenced batch's spans as they were given: each tensor has samples of its own.
  const Samples& samples() const { return samples_; }
  uint64_t seed() const { return seed_; }
  bool fenced() const { return fenced_; }

  // Calls copy(target, span, source, bytes, rows) for all of a span that is in the chunk: `rows` of
  // `bytes`, span.row_step apart from `source` on, go to `target` one behind the other. A chunk's border may
  // cut a row, so there are up to three calls a span. Zeroes the gaps between spans. `target` is the chunk's
  // slot.
  template <typename Copy>
  void Fill(const Chunk& chunk, uint8_t* target, Copy copy) const;

 private:
  Samples samples_;            // constant after construction
  std::vector<Span> spans_;    // constant after construction
  std::vector<Chunk> chunks_;  // constant after construction
  const bool fenced_;
  const uint64_t seed_;
};

template <typename Copy>
void Batch::Fill(const Chunk& chunk, uint8_t* target, Copy copy) const {
  uint64_t at = chunk.offset;
  const uint64_t end = chunk.offset + chunk.bytes;
  for (size_t i = chunk.first_span; i < spans_.size() && spans_[i].offset < end; ++i) {
    const Span& span = spans_[i];
    const uint64_t from = span.offset > chunk.offset ? span.offset : chunk.offset;
    const uint64_t to = span.offset + span.bytes < end ? span.offset + span.bytes : end;
    if (from >= to) continue;
    if (from > at) std::memset(target + (at - chunk.offset), 0, from - at);
    for (at = from; at < to;) {
      const uint64_t row = (at - span.offset) / span.row_bytes;
      const uint64_t cut_off = (at - span.offset) % span.row_bytes;
      const uint64_t bytes = std::min(span.row_bytes - cut_off, to - at);
      const uint64_t rows = bytes == span.row_bytes ? (to - at) / bytes : 1;
      copy(target + (at - chunk.offset), span, span.source + row * span.row_step + cut_off, bytes, rows);
      at += rows * bytes;
    }
  }
  if (at < end) std::memset(target + (at - chunk.offset), 0, end - at);
}

}  // namespace datastates
