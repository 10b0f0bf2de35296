// The block: the unit that one checksum and one digest cover in every data file (FORMAT.md). Nothing else
// belongs here.
#pragma once

#include <cstdint>

namespace datastates {

constexpr uint64_t kBlockBytes = uint64_t{1} << 20;
constexpr uint64_t kHeaderBytes = 4096;  // digests leave it out: it names the save

}  // namespace datastates
