// A CUDA driver for tests: the calls that cuda/device/driver.cc looks up, with their semantics and none of
// the hardware. "Device" pointers are host pointers.
//
// It can be wrong in the ways a real device can: a copy reads its source when it runs, not when it is
// enqueued, so a source overwritten too early shows in the target. Copies from or to memory that is not
// page-locked make the caller wait, and every call needs a current context, as cuda.h says. What tests
// order (failures, delays, held streams) comes in through the fake_* functions; driver.py wraps them.
#include <chrono>
#include <cstring>

#include "world.h"

namespace {

using namespace fake;

constexpr int kSuccess = 0;
constexpr int kInvalidValue = 1;
constexpr int kInvalidContext = 201;
constexpr int kInvalidHandle = 400;
constexpr int kNotFound = 500;
constexpr int kNotReady = 600;
constexpr int kStreamCaptureUnsupported = 900;
constexpr int kLeastPriority = 0;
constexpr int kGreatestPriority = -5;
constexpr size_t kMostPitch = (size_t{1} << 31) - 1;

thread_local void* current_context = nullptr;
thread_local int capture_mode = 0;  // global; 2 is relaxed

enum Needs { kNothing = 0, kContext = 1, kNoCapture = 2 };

// Counts and logs a call, makes it wait if the test holds it, and gives the error it is to return.
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
  const bool may_break_capture = (needs & kNoCapture) && world.capturing && capture_mode != 2;
  return may_break_capture ? kStreamCaptureUnsupported : kSuccess;
}

int Init(unsigned) { return Enter("cuInit", "", kNothing); }

int ErrorString(int code, const char** text) {
  static const std::map<int, const char*> texts = {
      {kInvalidValue, "invalid argument"},
      {kInvalidContext, "invalid device context"},
      {700, "an illegal memory access was encountered"},
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
  if (int code = Enter("cuStreamDestroy", NameOf(stream), kContext)) return code;
  return RetireStream(stream) ? kSuccess : kInvalidHandle;
}

int EventCreate(void** event, unsigned) {
  if (int code = Enter("cuEventCreate", "", kContext)) return code;
  World& world = TheWorld();
  Lock lock(world.mutex);
  Event made;
  *event = NewHandle(world, "event", &made.name);
  world.events[*event] = made;
  return kSuccess;
}

int EventDestroy(void* event) {
  if (int code = Enter("cuEventDestroy", NameOf(event), kContext)) return code;
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
  return mark == nullptr || mark->done ? kSuccess : kNotReady;
}

int EventSynchronize(void* event) {
  if (int code = Enter("cuEventSynchronize", NameOf(event), kContext | kNoCapture)) return code;
  std::shared_ptr<Mark> mark;
  if (int code = LastMark(event, &mark)) return code;
  Await(mark);
  return kSuccess;
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

// Memory may be gone when a copy runs only if the device was lost, and all waiting for it in vain.
int EnqueueCopy(void* stream, const std::string& size, const HostEnd& host, std::function<void()> copy) {
  const std::string name = NameOf(stream);
  auto mark = Enqueue(stream, [=] {
    SleepForCopy(host.bytes);
    Lock lock(TheWorld().mutex);
    if (!host.page_locked || IsRegistered(TheWorld(), host.memory, host.bytes)) {
      copy();
      TheWorld().log.push_back("ran copy " + name + " " + size);
    } else if (!TheWorld().lost) {
      TheWorld().log.push_back("misuse: memory was taken away from a copy");
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
  return EnqueueCopy(stream, size, host, run);
}

int CopyToDevice(unsigned long long target, const void* source, size_t bytes, void* stream) {
  const std::string name = NameOf(stream), size = std::to_string(bytes);
  const HostEnd host(source, bytes);
  if (int code = Enter("cuMemcpyHtoDAsync", name + " " + size, host.Needs())) return code;
  const auto run = [=] { std::memcpy(reinterpret_cast<void*>(target), source, bytes); };
  return EnqueueCopy(stream, size, host, run);
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
  const HostEnd host(copy->HostSide().host, (copy->rows - 1) * copy->HostSide().pitch + copy->row_bytes);
  if (int code = Enter("cuMemcpy2DAsync", name + " " + size, host.Needs())) return code;
  if (!copy->IsValid()) return kInvalidValue;
  return EnqueueCopy(stream, size, host, [rows = *copy] { rows.Run(); });
}

int HostRegister(void* memory, size_t bytes, unsigned) {
  if (int code = Enter("cuMemHostRegister", std::to_string(bytes), kContext | kNoCapture)) return code;
  Lock lock(TheWorld().mutex);
  TheWorld().registered[reinterpret_cast<uintptr_t>(memory)] = bytes;
  return kSuccess;
}

int HostUnregister(void* memory) {
  if (int code = Enter("cuMemHostUnregister", "", kContext | kNoCapture)) return code;
  Lock lock(TheWorld().mutex);
  return TheWorld().registered.erase(reinterpret_cast<uintptr_t>(memory)) ? kSuccess : kInvalidValue;
}

template <typename Function>
void* Address(Function* function) {
  return reinterpret_cast<void*>(function);
}

}  // namespace

extern "C" {

int cuGetProcAddress_v2(const char* name, void** function, int, unsigned long long, void*) {
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

int fake_is_idle(void* stream) {
  World& world = TheWorld();
  Lock lock(world.mutex);
  return world.streams.at(stream)->queue.empty();
}

// -- orders and observations --------------------------------------------------------------------------

void fake_hold_stream(void* stream, int held) {
  World& world = TheWorld();
  Lock lock(world.mutex);
  world.streams.at(stream)->held = held != 0;
  world.changed.notify_all();
}

void fake_hold_call(const char* name, int held) {
  World& world = TheWorld();
  Lock lock(world.mutex);
  if (held) {
    world.held_calls.insert(name);
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

void fake_delay_copies(int microseconds, double nanoseconds_per_byte) {
  Lock lock(TheWorld().mutex);
  TheWorld().microseconds_per_copy = microseconds;
  TheWorld().nanoseconds_per_byte = nanoseconds_per_byte;
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

long fake_registered_bytes() {
  Lock lock(TheWorld().mutex);
  size_t bytes = 0;
  for (const auto& [address, size] : TheWorld().registered) bytes += size;
  return static_cast<long>(bytes);
}

// Lines from `first` on; gives the bytes they need, and writes them if there is room.
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
  world.microseconds_per_copy = 0;
  world.nanoseconds_per_byte = 0;
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
  world.lost = false;
}

}  // extern "C"
