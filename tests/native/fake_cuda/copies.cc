// The fake driver's copies. One reads its source when its turn on the stream has come, not when it is
// enqueued.
#include <algorithm>
#include <cstring>

#include "calls.h"
#include "world.h"

namespace fake {
namespace {

constexpr size_t kMostPitch = (size_t{1} << 31) - 1;

// The end of a copy that is not the device's.
struct HostEnd {
  const void* memory;
  size_t bytes;
  bool page_locked;

  HostEnd(const void* memory, size_t bytes)
      : memory(memory), bytes(bytes), page_locked(IsPageLocked(memory, bytes)) {}
  int Needs() const { return kContext | (page_locked ? kNothing : kNoCapture); }
};

// The end of a copy that is the device's.
struct DeviceEnd {
  unsigned long long memory;
  size_t bytes;
};

// Memory may be gone when a copy runs only if the device was lost, and all waiting for it in vain.
int EnqueueCopy(void* stream, const std::string& size, const HostEnd& host, const DeviceEnd& device,
                std::function<void()> copy) {
  if (!IsAllocated(device.memory, device.bytes)) return kInvalidValue;
  const std::string name = NameOf(stream);
  auto mark = Enqueue(stream, [=] {
    AwaitCopyAllowed();
    SleepForCopy(host.bytes);
    Lock lock(TheWorld().mutex);
    World& world = TheWorld();
    const bool has_host = !host.page_locked || IsRegistered(world, host.memory, host.bytes);
    if (has_host && IsWithin(world.allocations, device.memory, device.bytes)) {
      copy();
      world.log.push_back("ran copy " + name + " " + size);
    } else if (has_host && Touches(world.unmapped, device.memory, device.bytes)) {
      world.context_error = kIllegalAddress;
    } else if (!world.lost) {
      world.log.push_back(has_host ? "misuse: device memory was freed before its copy"
                                   : "misuse: memory was taken away from a copy");
    }
  });
  if (mark == nullptr) return kInvalidHandle;
  if (!host.page_locked) Await(mark);
  return kSuccess;
}

}  // namespace

// CUDA_MEMCPY2D.
struct Rows {
  struct End {
    size_t x_bytes, y;
    int memory;  // 1: host, 2: device
    void* host;
    unsigned long long device;
    void* array;
    size_t pitch;

    char* begin() const { return memory == 1 ? static_cast<char*>(host) : reinterpret_cast<char*>(device); }
  } source, target;
  size_t row_bytes, rows;

  const End& HostSide() const { return source.memory == 1 ? source : target; }
  const End& DeviceSide() const { return source.memory == 1 ? target : source; }
  size_t BytesAt(const End& end) const { return (rows - 1) * end.pitch + row_bytes; }
  bool IsValid() const {
    const bool ends = source.memory + target.memory == 3 && HostSide().host != nullptr;
    const bool origin = source.x_bytes == 0 && source.y == 0 && target.x_bytes == 0 && target.y == 0;
    const auto fits = [this](size_t pitch) { return pitch >= row_bytes && pitch <= kMostPitch; };
    return ends && origin && fits(source.pitch) && fits(target.pitch);
  }
  void Run() const {
    for (size_t row = 0; row < rows; ++row) {
      std::memcpy(target.begin() + row * target.pitch, source.begin() + row * source.pitch, row_bytes);
    }
  }
};

int CopyToHost(void* target, unsigned long long source, size_t bytes, void* stream) {
  const std::string name = NameOf(stream), size = std::to_string(bytes);
  const HostEnd host(target, bytes);
  if (int code = Enter("cuMemcpyDtoHAsync", name + " " + size, host.Needs())) return code;
  const auto run = [=] { std::memcpy(target, reinterpret_cast<const void*>(source), bytes); };
  return EnqueueCopy(stream, size, host, {source, bytes}, run);
}

int CopyToDevice(unsigned long long target, const void* source, size_t bytes, void* stream) {
  const std::string name = NameOf(stream), size = std::to_string(bytes);
  const HostEnd host(source, bytes);
  if (int code = Enter("cuMemcpyHtoDAsync", name + " " + size, host.Needs())) return code;
  const auto run = [=] { std::memcpy(reinterpret_cast<void*>(target), source, bytes); };
  return EnqueueCopy(stream, size, host, {target, bytes}, run);
}

int CopyRows(const Rows* copy, void* stream) {
  const std::string name = NameOf(stream);
  const std::string size = std::to_string(copy->rows) + "x" + std::to_string(copy->row_bytes);
  const HostEnd host(copy->HostSide().host, copy->BytesAt(copy->HostSide()));
  if (int code = Enter("cuMemcpy2DAsync", name + " " + size, host.Needs())) return code;
  if (!copy->IsValid()) return kInvalidValue;
  const DeviceEnd device{copy->DeviceSide().device, copy->BytesAt(copy->DeviceSide())};
  return EnqueueCopy(stream, size, host, device, [rows = *copy] { rows.Run(); });
}

}  // namespace fake
