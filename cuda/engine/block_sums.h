// The checksums of one chunk: a CRC-32C for each block, or part of a block, in it. Which parts make a block
// is SaveJob's.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace datastates {

// The part of one block that is in one chunk; a border between chunks may split a block.
struct BlockPart {
  uint64_t offset;  // in the file
  uint64_t bytes;
  uint32_t crc;
};

// Sums a chunk from its begin to its end. What is copied by Copy is summed on the way; what lies between, and
// is in the slot already, when the sum comes to it. Used by one thread.
class BlockSums {
 public:
  // The chunk begins at `offset` in the file and at `slot` in memory.
  BlockSums(uint64_t offset, const uint8_t* slot) : offset_(offset), at_(slot) {}

  // Copies `bytes` into the slot, to `target`, which is not before the end of the last copy.
  void Copy(uint8_t* target, const uint8_t* source, size_t bytes);
  // Returns the parts once the chunk is filled up to `end`.
  std::vector<BlockPart> Finish(const uint8_t* end);

 private:
  void SumUntil(const uint8_t* end);
  // Returns the part that the next bytes belong to, and in *bytes how many of them.
  BlockPart& Next(size_t* bytes);

  uint64_t offset_;    // in the file, of what comes next
  const uint8_t* at_;  // the same in the slot
  std::vector<BlockPart> parts_;
};

}  // namespace datastates
