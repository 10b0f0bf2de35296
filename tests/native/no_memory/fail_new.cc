// Memory that runs out on request: LD_PRELOADed, its operator new stands before the C++ library's.
#include <dlfcn.h>
#include <execinfo.h>
#include <sys/prctl.h>

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <new>

namespace {

char thread_name[16];
std::atomic<long> left{0};  // allocations until the first that fails; 0: none fails
std::atomic<long> failed{0};
bool all_that_follow = false;
size_t least = 0, most = 0;  // bytes of those that are counted

// Whether the core asks for it, and not the bindings or the fake driver, which end the process if they get
// none.
bool IsOfTheCore() {
  void* frames[64];
  bool found = false;
  for (int i = 0, count = backtrace(frames, 64); i < count; ++i) {
    Dl_info info;
    if (dladdr(frames[i], &info) == 0) continue;
    if (std::strstr(info.dli_fname, "libfakecuda") != nullptr) return false;
    found = found || (info.dli_sname != nullptr && std::strstr(info.dli_sname, "10datastates") != nullptr);
  }
  return found;
}

bool Fails(size_t bytes) {
  if (left == 0 || bytes < least || bytes > most) return false;
  char name[16] = {};
  prctl(PR_GET_NAME, name, 0, 0, 0);
  if (std::strcmp(name, thread_name) != 0 || !IsOfTheCore()) return false;
  long now = left;
  while (now > 1 && !left.compare_exchange_weak(now, now - 1)) continue;
  if (now != 1 || (!all_that_follow && !left.compare_exchange_strong(now, 0))) return false;
  ++failed;
  return true;
}

}  // namespace

// The nth allocation from now on fails, on threads of that name. 0: none does.
extern "C" void fail_new(const char* name, long nth, int and_all_that_follow, size_t at_least,
                         size_t at_most) {
  left = 0;
  std::strncpy(thread_name, name, sizeof thread_name - 1);
  all_that_follow = and_all_that_follow != 0;
  least = at_least;
  most = at_most;
  failed = 0;
  left = nth;
}

extern "C" long failed_news() { return failed; }

void* operator new(size_t bytes) {
  void* const data = Fails(bytes) ? nullptr : std::malloc(bytes != 0 ? bytes : 1);
  if (data == nullptr) throw std::bad_alloc();
  return data;
}

void operator delete(void* data) noexcept { std::free(data); }
void operator delete(void* data, size_t) noexcept { std::free(data); }
