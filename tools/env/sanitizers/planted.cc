// One fault for each kind of report. sanitizers.sh calls each through ctypes, to prove that the sanitizer
// reports it.
#include <climits>
#include <cstring>
#include <thread>

extern "C" {

void overflow() {
  char* volatile bytes = new char[8];
  std::memset(bytes, 0, 9);
  delete[] bytes;
}

void leak() {
  for (int i = 0; i < 10; ++i) {  // several, since a stale register or stack slot may still point to one
    char* volatile bytes = new char[1000];
    bytes[0] = 0;
  }
}

void race() {
  static int counter = 0;
  std::thread other([] { ++counter; });
  ++counter;
  other.join();
}

int sum() {
  volatile int most = INT_MAX;
  return most + 1;
}

int misaligned() {
  alignas(int) char bytes[2 * sizeof(int)] = {};
  char* volatile odd = bytes + 1;
  return *reinterpret_cast<int*>(odd);
}

}  // extern "C"
