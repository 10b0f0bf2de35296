// What the fake driver is made of: streams that really run beside the caller, events, page-locked memory,
// and the orders of the test (what is to fail, to wait, to be slow). No CUDA signature here.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <vector>

namespace fake {

constexpr const char* kBusId = "FFFF:FF:1F.7";  // a place that no machine has anything at
constexpr size_t kQueueDepth = 1024;            // enqueueing more waits, as in the real driver

// One recording of an event. Done when the stream has come to it.
struct Mark {
  bool done = false;
  std::chrono::steady_clock::time_point at;  // when it was done
};

struct Event {
  std::string name;
  bool timing = false;
  void* context = nullptr;     // its creator's
  std::shared_ptr<Mark> last;  // null: never recorded, which counts as done
};

struct Stream {
  std::string name;
  void* context = nullptr;  // its creator's; null: the default stream, which every context has
  std::deque<std::function<void()>> queue;  // the first one may be running
  bool held = false;                        // the kernel that holds it goes on
  bool closing = false;
  std::thread thread;
};

struct Fault {
  long call;  // the number of the call that fails; 0: every one
  int code;
};

// Everything below is guarded by `mutex`; `changed` is signalled at any change. Never destroyed: streams
// may outlive main.
struct World {
  std::mutex mutex;
  std::condition_variable changed;

  std::map<void*, std::shared_ptr<Stream>> streams;
  std::vector<std::shared_ptr<Stream>> retired;  // destroyed, perhaps still running what they were given
  std::map<void*, Event> events;
  std::map<void*, int> devices;            // of contexts
  std::map<uintptr_t, size_t> registered;  // page-locked host memory: address -> bytes
  // Device memory, likewise. No copy may leave one, also where the next one follows at once.
  std::map<uintptr_t, size_t> allocations;
  std::map<uintptr_t, size_t> unmapped;  // by a memory saver: a copy that runs into it ends the context
  int context_error = 0;                 // what every call returns from then on
  std::vector<std::string> log;
  std::map<std::string, long> calls;
  std::string bus_id = kBusId;  // of every device
  long names = 0;               // handles are made of these

  std::map<std::string, Fault> faults;
  std::map<std::string, std::thread::id> held_calls;  // with the thread that may make them, if any
  std::set<std::string> hidden;
  bool one_connection = false;  // all streams share one queue: a full one makes every launch wait
  size_t deepest_queue = 0;     // the most operations that a stream, or that queue, has held
  bool copies_held = false;     // none begins to run
  int microseconds_per_copy = 0;
  double nanoseconds_per_byte = 0;
  bool lost = false;       // some call was ordered to fail forever
  bool capturing = false;  // some thread captures a graph in global mode
};

using Lock = std::unique_lock<std::mutex>;

extern thread_local void* current_context;  // of the calling thread

World& TheWorld();
void* NewHandle(World& world, const char* kind, std::string* name);  // with the lock

// All of these take the lock.
void* MakeStream(const char* kind);  // null: the default stream, unless it is there
bool RetireStream(void* handle);
// Queues work after everything that is on the stream. Null for a handle that is no stream.
std::shared_ptr<Mark> Enqueue(void* stream, std::function<void()> work);
void Await(const std::shared_ptr<Mark>& mark);
void Log(const std::string& line);
std::string NameOf(void* handle);
void AwaitCopyAllowed();
void SleepForCopy(size_t bytes);
bool IsPageLocked(const void* memory, size_t bytes);
bool IsRegistered(const World& world, const void* memory, size_t bytes);  // with the lock
// Whether these bytes are of one allocation of device memory.
bool IsAllocated(unsigned long long address, size_t bytes);
bool Touches(const std::map<uintptr_t, size_t>& ranges, uintptr_t address, size_t bytes);   // with the lock
bool IsWithin(const std::map<uintptr_t, size_t>& ranges, uintptr_t address, size_t bytes);  // with the lock

}  // namespace fake
