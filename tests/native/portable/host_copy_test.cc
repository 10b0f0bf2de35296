// Copies between host memory and slots: rows of every usual size, at any distance and alignment, and long
// ones, which go past the caches where the processor can do that.
#include "engine/host_copy.h"

#include <algorithm>

#include "check.h"

namespace {

using namespace datastates;

constexpr size_t kMargin = 64;  // nothing before or after the target may change

// Copies and compares with a loop over bytes.
void Compare(size_t bytes, size_t rows, size_t source_step, size_t target_step, size_t source_at,
             size_t target_at) {
  const auto source = SomeBytes(source_at + source_step * (rows - 1) + bytes, bytes);
  auto target = SomeBytes(kMargin + target_at + target_step * (rows - 1) + bytes + kMargin, bytes + 1);
  auto expected = target;
  for (size_t row = 0; row < rows; ++row) {
    for (size_t i = 0; i < bytes; ++i) {
      expected[kMargin + target_at + row * target_step + i] = source[source_at + row * source_step + i];
    }
  }
  CopyRows(target.data() + kMargin + target_at, target_step, source.data() + source_at, source_step, bytes,
           rows);
  const auto differs = std::mismatch(target.begin(), target.end(), expected.begin()).first;
  CHECK(differs == target.end(), "%zu rows of %zu bytes, %zu and %zu apart, at %zu and %zu: byte %td", rows,
        bytes, source_step, target_step, source_at, target_at, differs - target.begin());
}

}  // namespace

void TestHostCopy() {
  for (const size_t bytes : {1, 2, 3, 4, 5, 7, 8, 12, 16, 63, 64, 65, 1000, 4096}) {
    for (const size_t rows : {1, 2, 3, 17}) {
      for (const size_t at : {0, 1, 3, 8}) {
        Compare(bytes, rows, bytes, bytes, at, 0);
        Compare(bytes, rows, bytes + 1, bytes, 0, at);
        Compare(bytes, rows, bytes, 3 * bytes + 5, at, at);
      }
    }
  }
  const size_t long_bytes = size_t{64} << 10;  // as in host_copy.cc
  for (const size_t bytes :
       {long_bytes - 1, long_bytes, long_bytes + 1, 2 * long_bytes + 63, 5 * long_bytes}) {
    for (const size_t at : {0, 1, 15, 16, 33, 63}) {
      Compare(bytes, 1, bytes, bytes, at, 0);
      Compare(bytes, 1, bytes, bytes, 0, at);
      Compare(bytes, 2, bytes + 100, bytes + 7, 5, at);
    }
  }
}
