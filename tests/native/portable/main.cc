#include "check.h"

int main() {
  TestBlockSums();
  TestCrc32c();
  TestHostCopy();
  TestSha256();
  if (failures == 0) std::puts("all as expected");
  return failures == 0 ? 0 : 1;
}
