#include "engine/block_sums.h"

#include <algorithm>
#include <utility>

#include "engine/block.h"
#include "engine/crc32c.h"

namespace datastates {

BlockPart& BlockSums::Next(size_t* bytes) {
  if (parts_.empty() || offset_ % kBlockBytes == 0) parts_.push_back({offset_, 0, 0});
  *bytes = std::min<uint64_t>(*bytes, kBlockBytes - offset_ % kBlockBytes);
  offset_ += *bytes;
  at_ += *bytes;
  parts_.back().bytes += *bytes;
  return parts_.back();
}

void BlockSums::Copy(uint8_t* target, const uint8_t* source, size_t bytes) {
  SumUntil(target);
  while (bytes > 0) {
    size_t piece = bytes;
    BlockPart& part = Next(&piece);
    part.crc = CopyWithCrc32c(part.crc, target, source, piece);
    target += piece;
    source += piece;
    bytes -= piece;
  }
}

void BlockSums::SumUntil(const uint8_t* end) {
  while (at_ < end) {
    const uint8_t* const data = at_;
    size_t piece = static_cast<size_t>(end - at_);
    BlockPart& part = Next(&piece);
    part.crc = Crc32c(part.crc, data, piece);
  }
}

std::vector<BlockPart> BlockSums::Finish(const uint8_t* end) {
  SumUntil(end);
  return std::move(parts_);
}

}  // namespace datastates
