#include "world.h"

#include <pthread.h>

#include <algorithm>

namespace fake {

World& TheWorld() {
  static World* world = [] {
    static World* made = new World;
    // A forked child may ask what happened, so it must not inherit the lock from another thread.
    pthread_atfork([] { made->mutex.lock(); }, [] { made->mutex.unlock(); }, [] { made->mutex.unlock(); });
    return made;
  }();
  return *world;
}

void* NewHandle(World& world, const char* kind, std::string* name) {
  *name = kind + std::to_string(++world.names);
  return reinterpret_cast<void*>(static_cast<uintptr_t>(0x1000 + 16 * world.names));
}

static void Run(Stream* stream) {
  World& world = TheWorld();
  Lock lock(world.mutex);
  while (true) {
    world.changed.wait(lock, [&] { return !stream->queue.empty() || stream->closing; });
    if (stream->queue.empty()) return;
    const std::function<void()> work = std::move(stream->queue.front());
    lock.unlock();
    work();
    lock.lock();
    stream->queue.pop_front();
    world.changed.notify_all();
  }
}

void* MakeStream(const char* kind) {
  World& world = TheWorld();
  Lock lock(world.mutex);
  auto stream = std::make_shared<Stream>();
  void* handle = nullptr;  // the default stream's
  if (kind != nullptr) {
    handle = NewHandle(world, kind, &stream->name);
    stream->context = current_context;
  } else if (world.streams.count(nullptr)) {
    return nullptr;
  } else {
    stream->name = "default";
  }
  stream->thread = std::thread(Run, stream.get());
  world.streams[handle] = std::move(stream);
  return handle;
}

bool RetireStream(void* handle) {
  World& world = TheWorld();
  Lock lock(world.mutex);
  auto found = world.streams.find(handle);
  if (found == world.streams.end()) return false;
  found->second->closing = true;
  world.retired.push_back(found->second);
  world.streams.erase(found);
  world.changed.notify_all();
  return true;
}

// What a launch on `stream` adds to, with the lock.
static size_t QueueLength(const World& world, const Stream& stream) {
  if (!world.one_connection) return stream.queue.size();
  size_t all = 0;
  for (const auto& [handle, other] : world.streams) all += other->queue.size();
  return all;
}

std::shared_ptr<Mark> Enqueue(void* handle, std::function<void()> work) {
  World& world = TheWorld();
  Lock lock(world.mutex);
  auto found = world.streams.find(handle);
  if (found == world.streams.end()) return nullptr;
  const auto stream = found->second;
  world.changed.wait(lock, [&] { return QueueLength(world, *stream) < kQueueDepth; });
  world.deepest_queue = std::max(world.deepest_queue, QueueLength(world, *stream) + 1);
  auto mark = std::make_shared<Mark>();
  stream->queue.push_back([mark, work = std::move(work)] {
    work();
    Lock inner(TheWorld().mutex);
    mark->done = true;
    mark->at = std::chrono::steady_clock::now();
    TheWorld().changed.notify_all();
  });
  world.changed.notify_all();
  return mark;
}

void Await(const std::shared_ptr<Mark>& mark) {
  World& world = TheWorld();
  Lock lock(world.mutex);
  world.changed.wait(lock, [&] { return mark == nullptr || mark->done; });
}

void Log(const std::string& line) {
  Lock lock(TheWorld().mutex);
  TheWorld().log.push_back(line);
}

std::string NameOf(void* handle) {
  World& world = TheWorld();
  Lock lock(world.mutex);
  if (world.streams.count(handle)) return world.streams[handle]->name;
  if (world.events.count(handle)) return world.events[handle].name;
  return "unknown";
}

void AwaitCopyAllowed() {
  World& world = TheWorld();
  Lock lock(world.mutex);
  world.changed.wait(lock, [&] { return !world.copies_held; });
}

void SleepForCopy(size_t bytes) {
  double nanoseconds;
  {
    World& world = TheWorld();
    Lock lock(world.mutex);
    nanoseconds = 1e3 * world.microseconds_per_copy + world.nanoseconds_per_byte * static_cast<double>(bytes);
  }
  if (nanoseconds > 0) {
    std::this_thread::sleep_for(std::chrono::nanoseconds(static_cast<int64_t>(nanoseconds)));
  }
}

bool IsPageLocked(const void* memory, size_t bytes) {
  World& world = TheWorld();
  Lock lock(world.mutex);
  return IsRegistered(world, memory, bytes);
}

bool IsRegistered(const World& world, const void* memory, size_t bytes) {
  return IsWithin(world.registered, reinterpret_cast<uintptr_t>(memory), bytes);
}

bool IsAllocated(unsigned long long address, size_t bytes) {
  World& world = TheWorld();
  Lock lock(world.mutex);
  return IsWithin(world.allocations, address, bytes);
}

bool IsWithin(const std::map<uintptr_t, size_t>& ranges, uintptr_t address, size_t bytes) {
  const auto next = ranges.upper_bound(address);
  if (next == ranges.begin()) return false;
  const auto& [begin, size] = *std::prev(next);
  return address + bytes <= begin + size;
}

bool Touches(const std::map<uintptr_t, size_t>& ranges, uintptr_t address, size_t bytes) {
  const auto next = ranges.lower_bound(address + bytes);
  return next != ranges.begin() && std::prev(next)->first + std::prev(next)->second > address;
}

}  // namespace fake
