// CRC-32C: by the hardware's instruction where there is one, against tables; both against answers that are
// not ours.
#include "engine/crc32c.h"

#include <algorithm>
#include <cstring>
#include <string>

#include "check.h"

namespace {

using namespace datastates;

constexpr size_t kStream = 1024;  // as in crc32c.cc: three of them are one turn of its loop

// RFC 3720, section B.4, and the check value of the CRC catalogue.
void AnswersOfOthers() {
  uint8_t zeros[32] = {}, ones[32], rising[32], falling[32];
  std::memset(ones, 0xff, sizeof ones);
  for (uint8_t i = 0; i < 32; ++i) {
    rising[i] = i;
    falling[i] = static_cast<uint8_t>(31 - i);
  }
  const std::string digits = "123456789";
  const struct {
    const void* data;
    size_t bytes;
    uint32_t crc;
  } answers[] = {{zeros, 32, 0x8a9136aa},   {ones, 32, 0x62a8ab43},          {rising, 32, 0x46dd794e},
                 {falling, 32, 0x113fdb5c}, {digits.data(), 9, 0xe3069283u}, {digits.data(), 0, 0}};
  for (const auto& answer : answers) {
    const uint32_t crc = Crc32c(0, answer.data, answer.bytes);
    const uint32_t by_tables = Crc32cByTables(0, answer.data, answer.bytes);
    CHECK(crc == answer.crc, "%08x for %08x", crc, answer.crc);
    CHECK(by_tables == answer.crc, "%08x for %08x", by_tables, answer.crc);
  }
}

void HardwareAgreesWithTables() {
  const auto bytes = SomeBytes(20 * kStream);
  std::vector<size_t> lengths;
  for (size_t length = 0; length <= 70; ++length) lengths.push_back(length);
  for (size_t streams : {1, 2, 3, 6, 9, 15}) {
    for (size_t near = streams * kStream - 9; near <= streams * kStream + 9; ++near) lengths.push_back(near);
  }
  for (const size_t length : lengths) {
    for (size_t offset = 0; offset < 9; ++offset) {
      for (const uint32_t before : {0u, 0xdeadbeefu}) {
        const uint32_t crc = Crc32c(before, bytes.data() + offset, length);
        const uint32_t expected = Crc32cByTables(before, bytes.data() + offset, length);
        CHECK(crc == expected, "%zu bytes at %zu: %08x for %08x", length, offset, crc, expected);
      }
    }
  }
}

void PartsMakeTheWhole() {
  const auto bytes = SomeBytes((size_t{1} << 20) + 3, 2);
  const uint32_t whole = Crc32cByTables(0, bytes.data(), bytes.size());
  CHECK(Crc32c(0, bytes.data(), bytes.size()) == whole, "a block of a file");
  for (const size_t cut : {size_t{0}, size_t{1}, size_t{7}, 3 * kStream, size_t{65537}, bytes.size()}) {
    const uint32_t a = Crc32c(0, bytes.data(), cut), b = Crc32c(0, bytes.data() + cut, bytes.size() - cut);
    CHECK(Crc32c(a, bytes.data() + cut, bytes.size() - cut) == whole, "continued at %zu", cut);
    CHECK(Crc32cCombine(a, b, bytes.size() - cut) == whole, "combined at %zu", cut);
  }
}

// What a copy stores, what it leaves alone, and its checksum, at every alignment of both sides.
void CopiesAreSummed() {
  constexpr size_t kMargin = 64;
  const auto source = SomeBytes(size_t{1} << 16, 3);
  for (const size_t length : {size_t{0}, size_t{1}, size_t{63}, size_t{64}, size_t{1000}, 3 * kStream - 1,
                              3 * kStream, 3 * kStream + 65, 7 * kStream + 3, 9 * kStream, size_t{65000}}) {
    for (const size_t from : {0, 1, 7, 8, 63}) {
      for (const size_t to : {0, 1, 8, 33, 63}) {
        auto target = SomeBytes(kMargin + to + length + kMargin, 4);
        auto expected = target;
        std::copy_n(source.begin() + from, length, expected.begin() + kMargin + to);
        const uint32_t before = 0xdeadbeef;
        const uint32_t crc =
            CopyWithCrc32c(before, target.data() + kMargin + to, source.data() + from, length);
        CHECK(target == expected, "%zu bytes from %zu to %zu", length, from, to);
        CHECK(crc == Crc32cByTables(before, source.data() + from, length), "%zu bytes from %zu to %zu",
              length, from, to);
      }
    }
  }
}

}  // namespace

void TestCrc32c() {
  CopiesAreSummed();
  AnswersOfOthers();
  HardwareAgreesWithTables();
  PartsMakeTheWhole();
}
