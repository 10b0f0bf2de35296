// One source of a save, and where in the file it goes.
#pragma once

#include <cstdint>

namespace datastates {

// Rows of memory at equal distances, the first at `source`, become the file's bytes at `offset`, one after
// the other. One row, or rows that touch, are contiguous memory.
struct Span {
  uint64_t source;
  uint64_t bytes;  // of all rows together
  uint64_t offset;
  uint64_t row_bytes;  // divides `bytes`
  uint64_t row_step;   // from row to row: anything, also zero
  uint64_t storage;    // only runs with the same one are merged; any number names it
  bool eager;          // must be staged before the trainer goes on at all
  bool device;         // `source` is device memory
};

}  // namespace datastates
