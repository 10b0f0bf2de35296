// The block: the unit that one checksum covers in every data file (FORMAT.md). Nothing else belongs here.
#pragma once

#include <cstdint>

namespace datastates {

constexpr uint64_t kBlockBytes = uint64_t{1} << 20;

}  // namespace datastates
