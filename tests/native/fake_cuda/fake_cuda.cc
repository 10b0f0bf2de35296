// A CUDA driver for tests: the calls that cuda/device/driver.cc looks up, with their semantics and none of
// the hardware. "Device" pointers are host pointers.
//
// It can be wrong in the ways a real device can: a copy reads its source when it runs, not when it is
// enqueued, so a source overwritten too early shows in the target. Copies from or to memory that is not
// page-locked make the caller wait, and every call needs a current context, as cuda.h says. A copy that
// leaves an allocation of device memory is refused, one that runs when the memory was freed is a misuse, one
// that runs into unmapped memory ends the context (all calls but those that clean up fail from then on), and
// a stream that holds a thousand operations makes whoever launches more wait. What tests order (failures,
// delays, held streams) comes in through the functions of orders.cc.
#include <algorithm>
#include <chrono>
#include <cstring>

#include "world.h"

namespace fake {

thread_local void* current_context = nullptr;

}  // namespace fake

namespace {

using namespace fake;

constexpr int kSuccess = 0;
constexpr int kInvalidValue = 1;
constexpr int kInvalidContext = 201;
constexpr int kInvalidHandle = 400;
constexpr int kNotFound = 500;
constexpr int kNotReady = 600;
constexpr int kIllegalAddress = 700;
constexpr int kStreamCaptureUnsupported = 900;
constexpr int kAlreadyRegistered = 712;
constexpr unsigned kEventDisableTiming = 2;
constexpr int kLeastPriority = 0;
constexpr int kGreatestPriority = -5;
constexpr size_t kMostPitch = (size_t{1} << 31) - 1;

thread_local int capture_mode = 0;  // global; 2 is relaxed

enum Needs { kNothing = 0, kContext = 1, kNoCapture = 2, kCleaningUp = 4 };

// Counts and logs a call, makes it wait if the test holds it, and returns the error it is to return.
int Enter(const char* name, const std::string& arguments, int needs) {
  World& world = TheWorld();
  Lock lock(world.mutex);
  const long call = ++world.calls[name];
  world.log.push_back(arguments.empty() ? name : std::string(name) + " " + arguments);
  world.changed.wait(lock, [&] { return world.held_calls.count(name) == 0; });
  auto fault = world.faults.find(name);
  if (fault != world.faults.end() && (fault->second.call == 0 || fault->second.call == call)) {
    return fault->second.code;
  }
  if ((needs & kContext) && current_context == nullptr) {
    world.log.push_back(std::string("misuse: no context in ") + name);
    return kInvalidContext;
  }
  if ((needs & kContext) && !(needs & kCleaningUp) && world.context_error) return world.context_error;
  const bool may_break_capture = (needs & kNoCapture) && world.capturing && capture_mode != 2;
  return may_break_capture ? kStreamCaptureUnsupported : kSuccess;
}

int Init(unsigned) { return Enter("cuInit", "", kNothing); }

int ErrorString(int code, const char** text) {
  static const std::map<int, const char*> texts = {
      {kInvalidValue, "invalid argument"},
      {kInvalidContext, "invalid device context"},
      {kAlreadyRegistered, "part or all of the requested memory range is already mapped"},
      {kIllegalAddress, "an illegal memory access was encountered"},
      {719, "unspecified launch failure"},
      {kStreamCaptureUnsupported, "operation not permitted when stream is capturing"}};
  auto found = texts.find(code);
  *text = found == texts.end() ? nullptr : found->second;
  return found == texts.end() ? kInvalidValue : kSuccess;
}

int ContextGet(void** context) {
  *context = current_context;
  return Enter("cuCtxGetCurrent", "", kNothing);
}

int ContextSet(void* context) {
  if (int code = Enter("cuCtxSetCurrent", "", kNothing)) return code;
  current_context = context;
  return kSuccess;
}

int ContextDevice(int* device) {
  if (int code = Enter("cuCtxGetDevice", "", kContext)) return code;
  Lock lock(TheWorld().mutex);
  *device = TheWorld().devices.at(current_context);
  return kSuccess;
}

int DeviceBusId(char* text, int room, int) {
  if (int code = Enter("cuDeviceGetPCIBusId", "", kNothing)) return code;
  Lock lock(TheWorld().mutex);
  const std::string& id = TheWorld().bus_id;
  if (id.size() >= static_cast<size_t>(room)) return kInvalidValue;
  std::memcpy(text, id.c_str(), id.size() + 1);
  return kSuccess;
}

int ExchangeCaptureMode(int* mode) {
  if (int code = Enter("cuThreadExchangeStreamCaptureMode", "", kNothing)) return code;
  std::swap(*mode, capture_mode);
  return kSuccess;
}

int PriorityRange(int* least, int* greatest) {
  *least = kLeastPriority;
  *greatest = kGreatestPriority;
  return Enter("cuCtxGetStreamPriorityRange", "", kContext);
}

int StreamCreate(void** stream, unsigned flags, int priority) {
  const std::string arguments = "flags=" + std::to_string(flags) + " priority=" + std::to_string(priority);
  if (int code = Enter("cuStreamCreateWithPriority", arguments, kContext)) return code;
  *stream = MakeStream("stream");
  return kSuccess;
}

int StreamDestroy(void* stream) {
  if (int code = Enter("cuStreamDestroy", NameOf(stream), kContext | kCleaningUp)) return code;
  return RetireStream(stream) ? kSuccess : kInvalidHandle;
}

int EventCreate(void** event, unsigned flags) {
  if (int code = Enter("cuEventCreate", "", kContext)) return code;
  World& world = TheWorld();
  Lock lock(world.mutex);
  Event made;
  *event = NewHandle(world, "event", &made.name);
  made.timing = (flags & kEventDisableTiming) == 0;
  world.events[*event] = made;
  return kSuccess;
}

int EventDestroy(void* event) {
  if (int code = Enter("cuEventDestroy", NameOf(event), kContext | kCleaningUp)) return code;
  Lock lock(TheWorld().mutex);
  return TheWorld().events.erase(event) ? kSuccess : kInvalidHandle;
}

int EventRecord(void* event, void* stream) {
  if (int code = Enter("cuEventRecord", NameOf(event) + " " + NameOf(stream), kContext)) return code;
  auto mark = Enqueue(stream, [] {});
  Lock lock(TheWorld().mutex);
  auto found = TheWorld().events.find(event);
  if (mark == nullptr || found == TheWorld().events.end()) return kInvalidHandle;
  found->second.last = mark;
  return kSuccess;
}

// Gives the event's latest recording: what a wait that begins now waits for.
int LastMark(void* event, std::shared_ptr<Mark>* mark) {
  Lock lock(TheWorld().mutex);
  auto found = TheWorld().events.find(event);
  if (found == TheWorld().events.end()) return kInvalidHandle;
  *mark = found->second.last;
  return kSuccess;
}

int StreamWaitEvent(void* stream, void* event, unsigned) {
  if (int code = Enter("cuStreamWaitEvent", NameOf(stream) + " " + NameOf(event), kContext)) return code;
  std::shared_ptr<Mark> mark;
  if (int code = LastMark(event, &mark)) return code;
  return Enqueue(stream, [mark] { Await(mark); }) ? kSuccess : kInvalidHandle;
}

int EventQuery(void* event) {
  if (int code = Enter("cuEventQuery", NameOf(event), kContext | kNoCapture)) return code;
  std::shared_ptr<Mark> mark;
  if (int code = LastMark(event, &mark)) return code;
  Lock lock(TheWorld().mutex);
  return mark == nullptr || mark->done ? TheWorld().context_error : kNotReady;
}

int EventElapsed(float* milliseconds, void* begin, void* end) {
  if (int code = Enter("cuEventElapsedTime", NameOf(begin) + " " + NameOf(end), kContext)) return code;
  World& world = TheWorld();
  Lock lock(world.mutex);
  const auto from = world.events.find(begin), to = world.events.find(end);
  if (from == world.events.end() || to == world.events.end()) return kInvalidHandle;
  if (!from->second.timing || !to->second.timing) return kInvalidHandle;
  if (!from->second.last || !to->second.last) return kInvalidHandle;
  if (!from->second.last->done || !to->second.last->done) return kNotReady;
  const std::chrono::duration<float, std::milli> between = to->second.last->at - from->second.last->at;
  *milliseconds = between.count();
  return kSuccess;
}

int EventSynchronize(void* event) {
  if (int code = Enter("cuEventSynchronize", NameOf(event), kContext | kNoCapture)) return code;
  std::shared_ptr<Mark> mark;
  if (int code = LastMark(event, &mark)) return code;
  Await(mark);
  Lock lock(TheWorld().mutex);
  return TheWorld().context_error;
}

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

// CUmemcpyAttributes.
struct Attributes {
  int source_order;
  int source_location[2], target_location[2];
  unsigned flags;
};

// As of 12.8; here only to the host. The copies run in any order: here, the last one first.
int CopyBatch(unsigned long long* targets, unsigned long long* sources, size_t* sizes, size_t count,
              Attributes* attributes, size_t* first_of_attributes, size_t attribute_count, size_t* failed,
              void* stream) {
  const std::string name = NameOf(stream);
  if (int code = Enter("cuMemcpyBatchAsync", name + " " + std::to_string(count), kContext)) return code;
  if (stream == nullptr || count == 0 || attribute_count != 1 || first_of_attributes[0] != 0 ||
      attributes->source_order != 1 || attributes->flags > 1) {
    return kInvalidValue;
  }
  for (size_t i = 0; i < count; ++i) {
    *failed = i;
    if (!IsPageLocked(reinterpret_cast<void*>(targets[i]), sizes[i]) || !IsAllocated(sources[i], sizes[i])) {
      return kInvalidValue;
    }
  }
  size_t left = count;
  int end = kSuccess;
  {
    Lock lock(TheWorld().mutex);
    if (TheWorld().batches_break_code) {
      left = std::min(left, TheWorld().batches_break_after);
      end = TheWorld().batches_break_code;
    }
  }
  for (size_t i = count; left-- > 0;) {
    --i;
    const auto run = [target = targets[i], source = sources[i], bytes = sizes[i]] {
      std::memcpy(reinterpret_cast<void*>(target), reinterpret_cast<const void*>(source), bytes);
    };
    const HostEnd host(reinterpret_cast<void*>(targets[i]), sizes[i]);
    if (int code = EnqueueCopy(stream, std::to_string(sizes[i]), host, {sources[i], sizes[i]}, run)) {
      return code;
    }
  }
  return end;
}

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

int CopyRows(const Rows* copy, void* stream) {
  const std::string name = NameOf(stream);
  const std::string size = std::to_string(copy->rows) + "x" + std::to_string(copy->row_bytes);
  const HostEnd host(copy->HostSide().host, copy->BytesAt(copy->HostSide()));
  if (int code = Enter("cuMemcpy2DAsync", name + " " + size, host.Needs())) return code;
  if (!copy->IsValid()) return kInvalidValue;
  const DeviceEnd device{copy->DeviceSide().device, copy->BytesAt(copy->DeviceSide())};
  return EnqueueCopy(stream, size, host, device, [rows = *copy] { rows.Run(); });
}

int HostRegister(void* memory, size_t bytes, unsigned) {
  if (int code = Enter("cuMemHostRegister", std::to_string(bytes), kContext | kNoCapture)) return code;
  World& world = TheWorld();
  Lock lock(world.mutex);
  const auto begin = reinterpret_cast<uintptr_t>(memory);
  const auto next = world.registered.lower_bound(begin + bytes);
  if (next != world.registered.begin() && std::prev(next)->first + std::prev(next)->second > begin) {
    return kAlreadyRegistered;
  }
  world.registered[begin] = bytes;
  return kSuccess;
}

int HostUnregister(void* memory) {
  if (int code = Enter("cuMemHostUnregister", "", kContext | kNoCapture | kCleaningUp)) return code;
  Lock lock(TheWorld().mutex);
  return TheWorld().registered.erase(reinterpret_cast<uintptr_t>(memory)) ? kSuccess : kInvalidValue;
}

template <typename Function>
void* Address(Function* function) {
  return reinterpret_cast<void*>(function);
}

}  // namespace

extern "C" {

int cuGetProcAddress_v2(const char* name, void** function, int version, unsigned long long, void*) {
  static const std::map<std::string, void*> functions = {
      {"cuInit", Address(Init)},
      {"cuGetErrorString", Address(ErrorString)},
      {"cuCtxGetCurrent", Address(ContextGet)},
      {"cuCtxSetCurrent", Address(ContextSet)},
      {"cuCtxGetDevice", Address(ContextDevice)},
      {"cuDeviceGetPCIBusId", Address(DeviceBusId)},
      {"cuThreadExchangeStreamCaptureMode", Address(ExchangeCaptureMode)},
      {"cuCtxGetStreamPriorityRange", Address(PriorityRange)},
      {"cuStreamCreateWithPriority", Address(StreamCreate)},
      {"cuStreamDestroy", Address(StreamDestroy)},
      {"cuStreamWaitEvent", Address(StreamWaitEvent)},
      {"cuEventCreate", Address(EventCreate)},
      {"cuEventDestroy", Address(EventDestroy)},
      {"cuEventRecord", Address(EventRecord)},
      {"cuEventQuery", Address(EventQuery)},
      {"cuEventSynchronize", Address(EventSynchronize)},
      {"cuEventElapsedTime", Address(EventElapsed)},
      {"cuMemcpyDtoHAsync", Address(CopyToHost)},
      {"cuMemcpyHtoDAsync", Address(CopyToDevice)},
      {"cuMemcpy2DAsync", Address(CopyRows)},
      {"cuMemcpyBatchAsync", Address(CopyBatch)},
      {"cuMemHostRegister", Address(HostRegister)},
      {"cuMemHostUnregister", Address(HostUnregister)}};
  Log(std::string("look up ") + name);
  auto found = functions.find(name);
  Lock lock(TheWorld().mutex);
  if (found == functions.end() || TheWorld().hidden.count(name)) return kNotFound;
  // 12.8 brought it, 13.0 changed it.
  if (found->first == "cuMemcpyBatchAsync" && (version < 12080 || version >= 13000)) return kNotFound;
  *function = found->second;
  return kSuccess;
}

}  // extern "C"
