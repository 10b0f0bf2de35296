// The unit of a save's plan: source bytes that are copied in one go, and their place in the file. Plain
// values only; what is done with them is in engine/batch.h.
#pragma once

#include <cstdint>

namespace datastates {

// A span is `rows` of `row_bytes` at equal distances in memory, the first at `source`. The file stores them
// one after another from `offset` on. A single row, or rows that touch, are contiguous memory.
struct Span {
  uint64_t source;
  uint64_t bytes;  // of all rows together
  uint64_t offset;
  uint64_t row_bytes;  // divides `bytes`
  uint64_t row_step;   // from the start of a row to the start of the next: any value, zero included
  uint64_t storage;    // any number that names the storage; only spans of one storage are merged
  bool eager;          // must be copied before Start's caller continues
  bool device;         // `source` is device memory
};

}  // namespace datastates
