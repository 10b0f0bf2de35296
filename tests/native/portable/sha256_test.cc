// SHA-256: by the processor's instructions where it has them, against portable code; both against answers
// that are not ours.
#include "engine/sha256.h"

#include <cstdio>
#include <string>

#include "check.h"

namespace {

using namespace datastates;

std::string Hex(const Sha256Digest& digest) {
  std::string text;
  char two[3];
  for (const uint8_t byte : digest) {
    std::snprintf(two, sizeof two, "%02x", byte);
    text += two;
  }
  return text;
}

// FIPS 180-4's examples (NIST, "SHA256.pdf"), and the empty message.
void AnswersOfOthers() {
  const struct {
    std::string data, digest;
  } answers[] = {
      {"", "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"},
      {"abc", "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"},
      {"abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq",
       "248d6a61d20638b8e5c026930c3e6039a33ce45964ff2167f6ecedd419db06c1"},
      {std::string(1000000, 'a'), "cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0"},
  };
  for (const auto& answer : answers) {
    for (const auto sha256 : {Sha256, Sha256Portable}) {
      const std::string digest = Hex(sha256(answer.data.data(), answer.data.size()));
      CHECK(digest == answer.digest, "%s for %s", digest.c_str(), answer.digest.c_str());
    }
  }
}

void HardwareAgreesWithPortableCode() {
  const auto bytes = SomeBytes(1100);
  for (size_t begin = 0; begin < 17; ++begin) {
    for (size_t size = 0; size + begin <= bytes.size(); ++size) {
      const bool same = Sha256(&bytes[begin], size) == Sha256Portable(&bytes[begin], size);
      CHECK(same, "%zu bytes from byte %zu", size, begin);
    }
  }
}

}  // namespace

void TestSha256() {
  AnswersOfOthers();
  HardwareAgreesWithPortableCode();
}
