// Copies between host memory and slots. block_sums.cc copies what is also summed.
#pragma once

#include <cstddef>
#include <cstdint>

namespace datastates {

// Rows of so many bytes and more are long: they bypass the caches.
constexpr size_t kLongBytes = size_t{64} << 10;

// Copies `rows` of `row_bytes`, `source_step` apart at `source`, to places `target_step` apart at `target`.
//
// Long rows bypass the caches: staged bytes are written much later, and loaded ones are used later still. An
// ordinary store first reads the target's old cache lines, which takes a third of the memory bandwidth from
// this copy and from the trainer. (Bypassing raised 5.8 GB/s to 8.4 on a Xeon of family 6, model 207, with
// slots of 256 MiB in turn.)
void CopyRows(uint8_t* target, size_t target_step, const uint8_t* source, size_t source_step,
              size_t row_bytes, size_t rows);

}  // namespace datastates
