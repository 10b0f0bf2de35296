// What tests call: the trainer's side of the fake driver, orders to it, and what they see of it. driver.py
// wraps these functions.
#include <sys/mman.h>

#include <chrono>
#include <cstring>

#include "world.h"

using namespace fake;

namespace {

constexpr size_t kArenaBytes = size_t{1} << 30;

}  // namespace

extern "C" {

// -- the trainer's side -------------------------------------------------------------------------------

// Each on a device of its own, the first since fake_reset on device 0.
void* fake_new_context() {
  MakeStream(nullptr);
  World& world = TheWorld();
  Lock lock(world.mutex);
  std::string name;
  void* const context = NewHandle(world, "context", &name);
  const int device = static_cast<int>(world.devices.size());
  world.devices[context] = device;
  return context;
}

void fake_use_context(void* context) { current_context = context; }

// Device memory. Consecutive allocations that are multiples of 512 bytes are neighbours, as in a real device.
void* fake_allocate(size_t bytes) {
  static char* const arena = static_cast<char*>(
      mmap(nullptr, kArenaBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
  World& world = TheWorld();
  Lock lock(world.mutex);
  size_t at = 0;
  for (const auto& [begin, size] : world.allocations) {
    const size_t offset = begin - reinterpret_cast<uintptr_t>(arena);
    if (offset < kArenaBytes) at = std::max(at, (offset + size + 511) / 512 * 512);
  }
  if (at + bytes > kArenaBytes) return nullptr;
  world.allocations[reinterpret_cast<uintptr_t>(arena + at)] = bytes;
  return arena + at;
}

void fake_free(void* memory) {
  World& world = TheWorld();
  Lock lock(world.mutex);
  world.allocations.erase(reinterpret_cast<uintptr_t>(memory));
}

// As torch_memory_saver does: the addresses stay, and nothing is there.
void fake_unmap(void* memory) {
  World& world = TheWorld();
  Lock lock(world.mutex);
  const auto found = world.allocations.find(reinterpret_cast<uintptr_t>(memory));
  world.unmapped.insert(*found);
  world.allocations.erase(found);
}

// Takes host memory for an allocation of the device, instead of what was known of these addresses.
void fake_adopt(void* memory, size_t bytes) {
  World& world = TheWorld();
  Lock lock(world.mutex);
  const auto begin = reinterpret_cast<uintptr_t>(memory);
  auto at = world.allocations.lower_bound(begin);
  if (at != world.allocations.begin() && std::prev(at)->first + std::prev(at)->second > begin) --at;
  while (at != world.allocations.end() && at->first < begin + bytes) at = world.allocations.erase(at);
  world.allocations[begin] = bytes;
}

void* fake_new_stream() { return MakeStream("trainer"); }

void fake_drop_stream(void* stream) { RetireStream(stream); }

// A kernel that takes a while and then fills memory.
void fake_launch_fill(void* stream, void* target, int value, size_t bytes, int milliseconds) {
  const std::string name = NameOf(stream);
  Enqueue(stream, [=] {
    std::this_thread::sleep_for(std::chrono::milliseconds(milliseconds));
    std::memset(target, value, bytes);
    Log("ran fill " + name);
  });
}

void fake_synchronize(void* stream) {
  Await(Enqueue(stream, [] {}));
}

// As cuCtxSynchronize, which torch.cuda.synchronize() calls: waits for all that every stream was given.
void fake_synchronize_device() {
  World& world = TheWorld();
  std::vector<std::shared_ptr<Mark>> marks;
  std::vector<void*> streams;
  {
    Lock lock(world.mutex);
    for (const auto& [handle, stream] : world.streams) streams.push_back(handle);
  }
  for (void* stream : streams) marks.push_back(Enqueue(stream, [] {}));
  for (const auto& mark : marks) Await(mark);
}

int fake_is_idle(void* stream) {
  World& world = TheWorld();
  Lock lock(world.mutex);
  return world.streams.at(stream)->queue.empty();
}

// -- orders and observations --------------------------------------------------------------------------

// A kernel that runs until the stream is released: what was launched before it is not held.
void fake_hold_stream(void* handle) {
  World& world = TheWorld();
  Lock lock(world.mutex);
  const auto stream = world.streams.at(handle);
  stream->held = true;
  lock.unlock();
  Enqueue(handle, [stream] {
    Lock inner(TheWorld().mutex);
    TheWorld().changed.wait(inner, [&] { return !stream->held; });
  });
}

void fake_release_stream(void* handle) {
  World& world = TheWorld();
  Lock lock(world.mutex);
  world.streams.at(handle)->held = false;
  world.changed.notify_all();
}

void fake_hold_call(const char* name, int held, int except_here) {
  World& world = TheWorld();
  Lock lock(world.mutex);
  if (held) {
    world.held_calls[name] = except_here ? std::this_thread::get_id() : std::thread::id();
  } else {
    world.held_calls.erase(name);
  }
  world.changed.notify_all();
}

// The nth call from now on fails (0: every one).
void fake_fail(const char* name, long nth, int code) {
  World& world = TheWorld();
  Lock lock(world.mutex);
  world.faults[name] = {nth == 0 ? 0 : world.calls[name] + nth, code};
  world.lost |= nth == 0;
}

// Copies are enqueued, and none runs.
void fake_hold_copies(int held) {
  Lock lock(TheWorld().mutex);
  TheWorld().copies_held = held != 0;
  TheWorld().changed.notify_all();
}

void fake_delay_copies(int microseconds, double nanoseconds_per_byte) {
  Lock lock(TheWorld().mutex);
  TheWorld().microseconds_per_copy = microseconds;
  TheWorld().nanoseconds_per_byte = nanoseconds_per_byte;
}

void fake_one_connection(int shared) {
  Lock lock(TheWorld().mutex);
  TheWorld().one_connection = shared != 0;
}

long fake_deepest_queue() {
  Lock lock(TheWorld().mutex);
  return static_cast<long>(TheWorld().deepest_queue);
}

void fake_hide(const char* name) {
  Lock lock(TheWorld().mutex);
  TheWorld().hidden.insert(name);
}

void fake_set_bus_id(const char* id) {
  Lock lock(TheWorld().mutex);
  TheWorld().bus_id = id;
}

void fake_capture(int capturing) {
  Lock lock(TheWorld().mutex);
  TheWorld().capturing = capturing != 0;
}

long fake_live_streams() {
  Lock lock(TheWorld().mutex);
  return static_cast<long>(TheWorld().streams.size() - TheWorld().streams.count(nullptr));
}

long fake_live_events() {
  Lock lock(TheWorld().mutex);
  return static_cast<long>(TheWorld().events.size());
}

void fake_forget_registered() {
  Lock lock(TheWorld().mutex);
  TheWorld().registered.clear();
}

long fake_registered_bytes() {
  Lock lock(TheWorld().mutex);
  size_t bytes = 0;
  for (const auto& [address, size] : TheWorld().registered) bytes += size;
  return static_cast<long>(bytes);
}

// Lines from `first` on; returns the bytes they need, and writes them if there is room.
size_t fake_log(size_t first, char* buffer, size_t room) {
  World& world = TheWorld();
  Lock lock(world.mutex);
  std::string text;
  for (size_t i = first; i < world.log.size(); ++i) text += world.log[i] + "\n";
  if (text.size() <= room) std::memcpy(buffer, text.data(), text.size());
  return text.size();
}

// Forgets all orders, so that everything runs out.
void fake_let_go() {
  World& world = TheWorld();
  Lock lock(world.mutex);
  world.faults.clear();
  world.held_calls.clear();
  world.hidden.clear();
  world.capturing = false;
  world.copies_held = false;
  world.microseconds_per_copy = 0;
  world.nanoseconds_per_byte = 0;
  world.one_connection = false;
  for (const auto& [handle, stream] : world.streams) stream->held = false;
  for (const auto& stream : world.retired) stream->held = false;
  world.changed.notify_all();
}

// Also joins the streams that were destroyed, and clears the log.
void fake_reset() {
  fake_let_go();
  World& world = TheWorld();
  Lock lock(world.mutex);
  const auto retired = std::move(world.retired);
  world.retired.clear();
  lock.unlock();
  for (const auto& stream : retired) stream->thread.join();
  lock.lock();
  world.log.clear();
  world.devices.clear();
  world.bus_id = kBusId;
  world.allocations.clear();
  world.unmapped.clear();
  world.context_error = 0;
  world.deepest_queue = 0;
  world.lost = false;
}

}  // extern "C"
