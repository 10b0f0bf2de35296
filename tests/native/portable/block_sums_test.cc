// Checksums of a chunk that are taken while it is filled: those of its blocks, however it is filled.
#include "engine/block_sums.h"

#include <cstring>

#include "check.h"
#include "engine/block.h"
#include "engine/crc32c.h"

namespace {

using namespace datastates;

// Fills a chunk that begins at `offset`: copies that are summed on the way in place of every other piece.
void Compare(uint64_t offset, const std::vector<size_t>& pieces) {
  size_t bytes = 0;
  for (const size_t piece : pieces) bytes += piece;
  const auto source = SomeBytes(bytes, offset + bytes);
  std::vector<uint8_t> slot(bytes);
  BlockSums sums(offset, slot.data());
  size_t at = 0;
  for (size_t i = 0; i < pieces.size(); at += pieces[i++]) {
    if (i % 2 == 0) {
      std::memcpy(slot.data() + at, source.data() + at, pieces[i]);
    } else {
      sums.Copy(slot.data() + at, source.data() + at, pieces[i]);
    }
  }
  const auto parts = sums.Finish(slot.data() + bytes);
  CHECK(slot == source, "%zu bytes at %zu", bytes, static_cast<size_t>(offset));
  uint64_t end = offset;
  for (const BlockPart& part : parts) {
    CHECK(part.offset == end, "part at %zu", static_cast<size_t>(part.offset));
    CHECK(part.offset == offset || part.offset % kBlockBytes == 0, "part at %zu",
          static_cast<size_t>(part.offset));
    CHECK(part.bytes <= kBlockBytes - part.offset % kBlockBytes, "%zu bytes",
          static_cast<size_t>(part.bytes));
    const uint32_t crc = Crc32cByTables(0, source.data() + (part.offset - offset), part.bytes);
    CHECK(part.crc == crc, "%zu bytes at %zu", static_cast<size_t>(part.bytes),
          static_cast<size_t>(part.offset));
    end += part.bytes;
  }
  CHECK(end == offset + bytes, "%zu bytes at %zu", bytes, static_cast<size_t>(offset));
}

}  // namespace

void TestBlockSums() {
  const size_t block = kBlockBytes;
  for (const uint64_t offset : {uint64_t{0}, uint64_t{4096}, 3 * kBlockBytes, 3 * kBlockBytes - 4096}) {
    Compare(offset, {});
    Compare(offset, {0, 4096});
    Compare(offset, {4096});
    Compare(offset, {0, 2 * block});
    Compare(offset, {2 * block});
    Compare(offset, {4096, block, 12288});
    Compare(offset, {100, 70000, 28, 65536 + 7, 33, 3 * block + 5});
    Compare(offset, {0, block - 4096, 0, 4096, 0, block});
  }
}
