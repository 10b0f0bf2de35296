// A CUDA driver for tests: the calls that cuda/device/driver.cc looks up, with their semantics and none of
// the hardware. "Device" pointers are host pointers.
//
// It can be wrong in the ways a real device can: a copy reads its source when it runs, not when it is
// enqueued, so a source overwritten too early shows in the target. Copies from or to memory that is not
// page-locked make the caller wait, and every call needs a current context, as cuda.h says. A copy that
// leaves an allocation of device memory is refused, one that runs when the memory was freed is a misuse, one
// that runs into unmapped memory ends the context (all calls but those that clean up fail from then on), and
// a stream that holds a thousand operations makes whoever launches more wait. Copies are in copies.cc. What
// tests order (failures, delays, held streams) comes in through the functions of orders.cc.
#include <chrono>
#include <cstring>

#include "calls.h"
#include "world.h"

namespace fake {

thread_local void* current_context = nullptr;
thread_local int capture_mode = 0;  // global; 2 is relaxed

int Enter(const char* name, const std::string& arguments, int needs) {
  World& world = TheWorld();
  Lock lock(world.mutex);
  const long call = ++world.calls[name];
  world.log.push_back(arguments.empty() ? name : std::string(name) + " " + arguments);
  world.changed.wait(lock, [&] {
    const auto held = world.held_calls.find(name);
    return held == world.held_calls.end() || held->second == std::this_thread::get_id();
  });
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

}  // namespace fake

namespace {

using namespace fake;

constexpr unsigned kEventDisableTiming = 2;
constexpr unsigned kHostRegisterPortable = 1;
constexpr int kLeastPriority = 0;
constexpr int kGreatestPriority = -5;

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

int RetainPrimary(void** context, int device) {
  if (int code = Enter("cuDevicePrimaryCtxRetain", std::to_string(device), kNothing)) return code;
  Lock lock(TheWorld().mutex);
  for (const auto& [known, of] : TheWorld().devices) {
    if (of == device) *context = known;
  }
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
  if (int code = Enter("cuEventCreate", std::to_string(flags), kContext)) return code;
  World& world = TheWorld();
  Lock lock(world.mutex);
  Event made;
  *event = NewHandle(world, "event", &made.name);
  made.timing = (flags & kEventDisableTiming) == 0;
  made.context = current_context;
  world.events[*event] = made;
  return kSuccess;
}

int EventDestroy(void* event) {
  if (int code = Enter("cuEventDestroy", NameOf(event), kContext | kCleaningUp)) return code;
  Lock lock(TheWorld().mutex);
  return TheWorld().events.erase(event) ? kSuccess : kInvalidHandle;
}

// By CUDA's documentation, cuEventRecord and cuEventElapsedTime need handles of one context; queries and
// waits do not.
bool AreOfOneContext(void* event, void* stream) {
  World& world = TheWorld();
  Lock lock(world.mutex);
  const auto recorded = world.events.find(event);
  const auto on = world.streams.find(stream);
  return recorded != world.events.end() && on != world.streams.end() &&
         (on->second->context == nullptr || on->second->context == recorded->second.context);
}

int EventRecord(void* event, void* stream) {
  if (int code = Enter("cuEventRecord", NameOf(event) + " " + NameOf(stream), kContext)) return code;
  if (!AreOfOneContext(event, stream)) return kInvalidHandle;
  auto mark = Enqueue(stream, [] {});
  Lock lock(TheWorld().mutex);
  auto found = TheWorld().events.find(event);
  if (mark == nullptr || found == TheWorld().events.end()) return kInvalidHandle;
  found->second.last = mark;
  return kSuccess;
}

// Finds the event's latest recording: what a wait that begins now waits for.
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
  if (from->second.context != to->second.context) return kInvalidHandle;
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

int HostRegister(void* memory, size_t bytes, unsigned flags) {
  if (int code = Enter("cuMemHostRegister", std::to_string(bytes), kContext | kNoCapture)) return code;
  if ((flags & kHostRegisterPortable) == 0) Log("misuse: memory is page-locked for one context only");
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
      {"cuDevicePrimaryCtxRetain", Address(RetainPrimary)},
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
      {"cuMemHostRegister", Address(HostRegister)},
      {"cuMemHostUnregister", Address(HostUnregister)}};
  Log(std::string("look up ") + name);
  auto found = functions.find(name);
  Lock lock(TheWorld().mutex);
  if (found == functions.end() || TheWorld().hidden.count(name)) return kNotFound;
  *function = found->second;
  return kSuccess;
}

}  // extern "C"
