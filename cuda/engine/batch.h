// A batch: the plan of one contiguous part of a data file, as spans cut into slot-sized chunks. Pure
// planning: no memory of a source is read here, except through the function that Fill is given.
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
  // multiples of kAlignment. Spans that are neighbours both in memory and in the file are merged if they
  // share a storage: the CUDA driver refuses a copy that leaves an allocation, even into one that follows
  // directly (torch allocates blocks of 10 MiB and more separately). Throws Failure. `fenced`: the sources
  // may change after the next fence, so the fence waits for this batch. `seed` selects the places where they
  // are sampled.
  Batch(uint64_t begin, uint64_t end, uint64_t chunk_bytes, bool fenced, std::vector<Span> spans,
        uint64_t seed);

  struct Chunk {
    uint64_t offset;    // in the file
    uint64_t bytes;     // a multiple of kAlignment
    size_t first_span;  // the first span with bytes in this chunk
    bool eager;         // holds bytes of an eager span
    bool device;        // holds bytes of a device span
  };

  const std::vector<Chunk>& chunks() const { return chunks_; }
  // The number of chunks up to the last eager one. What precedes it, such as the header, is not postponed.
  size_t eager_end() const { return eager_end_; }
  const std::vector<Span>& spans() const { return spans_; }
  // Samples of a fenced batch, chosen before spans are merged: each tensor has its own.
  const Samples& samples() const { return samples_; }
  uint64_t seed() const { return seed_; }
  bool fenced() const { return fenced_; }

  // Calls copy(target, span, source, bytes, rows) for each part of a span within the chunk: `rows` of
  // `bytes`, span.row_step apart from `source` on, go to `target` one after another. A chunk's border may
  // cut a row, so there are up to three calls a span. Zeroes the gaps between spans. `target` is the chunk's
  // slot.
  template <typename Copy>
  void Fill(const Chunk& chunk, uint8_t* target, Copy copy) const;

 private:
  Samples samples_;            // constant after construction
  std::vector<Span> spans_;    // constant after construction
  std::vector<Chunk> chunks_;  // constant after construction
  size_t eager_end_ = 0;       // constant after construction
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
