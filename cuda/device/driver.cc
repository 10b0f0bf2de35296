#include "device/driver.h"

#include <dlfcn.h>

namespace datastates {
namespace {

constexpr int kVersion = 12000;  // the CUDA version whose signatures are used below
constexpr int kSuccess = 0;
constexpr int kInvalidValue = 1;
constexpr int kNotReady = 600;
constexpr unsigned kStreamNonBlocking = 1;
constexpr unsigned kEventBlockingSync = 1;
constexpr unsigned kEventDisableTiming = 2;
constexpr unsigned kHostRegisterPortable = 1;
constexpr int kCaptureModeRelaxed = 2;

constexpr int kBusIdBytes = 32;  // cuda.h requires 13

constexpr unsigned kMemoryHost = 1;
constexpr unsigned kMemoryDevice = 2;

// Follows the error of a copy; the plan has already checked addresses and sizes.
constexpr const char* kNotMapped =
    "invalid argument (CUDA error 1): has the memory of a tensor been freed or unmapped since the save "
    "or the load began? Code that frees it must call megatron_datastates.fence() first";
constexpr const char* kAllIsLost =
    ". After this error every CUDA call of this process fails, the trainer's too: restart the process";

// See ContextLost; 4: the driver is shutting down; 214, 220: memory or NVLink has lost data.
bool EndsContext(int result) {
  for (const int ending :
       {4, 214, 220, 226, 700, 702, 709, 710, 714, 715, 716, 717, 718, 719, 721, 810, 911}) {
    if (result == ending) return true;
  }
  return false;
}

using GetProcAddress = int (*)(const char*, void**, int, unsigned long long, void*);

}  // namespace

// CUDA_MEMCPY2D.
struct CopyOfRows {
  struct End {
    size_t x_bytes, y;
    unsigned memory;
    const void* host;
    CuPointer device;
    void* array;
    size_t pitch;
  } source, target;
  size_t row_bytes, rows;
};
static_assert(sizeof(CopyOfRows) == 128);

struct Driver::Table {
  GetProcAddress lookup = nullptr;
  int (*init)(unsigned);
  int (*error_string)(int, const char**);
  int (*context_get)(CuContext*);
  int (*context_set)(CuContext);
  int (*context_device)(int*);
  int (*context_retain)(CuContext*, int);
  int (*exchange_capture_mode)(int*);
  int (*priority_range)(int*, int*);
  int (*stream_create)(CuStream*, unsigned, int);
  int (*stream_destroy)(CuStream);
  int (*stream_wait)(CuStream, CuEvent, unsigned);
  int (*event_create)(CuEvent*, unsigned);
  int (*event_elapsed)(float*, CuEvent, CuEvent);
  int (*event_destroy)(CuEvent);
  int (*event_record)(CuEvent, CuStream);
  int (*event_query)(CuEvent);
  int (*event_synchronize)(CuEvent);
  int (*copy_to_host)(void*, CuPointer, size_t, CuStream);
  int (*copy_to_device)(CuPointer, const void*, size_t, CuStream);
  int (*copy_rows)(const CopyOfRows*, CuStream);
  int (*host_register)(void*, size_t, unsigned);
  int (*host_unregister)(void*);
  int (*bus_id)(char*, int, int) = nullptr;  // null where there is none

  template <typename Function>
  bool Find(const char* name, int version, Function** slot) {
    void* found = nullptr;
    if (lookup(name, &found, version, 0, nullptr) != kSuccess || found == nullptr) return false;
    *slot = reinterpret_cast<Function*>(found);
    return true;
  }
  template <typename Function>
  void Load(const char* name, Function** slot) {
    if (Find(name, kVersion, slot)) return;
    throw Failure("look up", name, 0, "this CUDA driver is too old: 12.0 or newer is needed");
  }
};

std::shared_ptr<Driver> Driver::Open(const std::string& path) {
  void* library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    throw Failure("open the CUDA driver", path, 0,
                  std::string(dlerror()) + "; a tensor on a GPU cannot be saved or loaded without it");
  }
  auto table = std::make_unique<Table>();
  table->lookup = reinterpret_cast<GetProcAddress>(dlsym(library, "cuGetProcAddress_v2"));
  if (table->lookup == nullptr) {
    throw Failure("open the CUDA driver", path, 0,
                  "it has no cuGetProcAddress_v2: CUDA 12.0 or newer is needed");
  }
  table->Load("cuInit", &table->init);
  table->Load("cuGetErrorString", &table->error_string);
  table->Load("cuCtxGetCurrent", &table->context_get);
  table->Load("cuCtxSetCurrent", &table->context_set);
  table->Load("cuCtxGetDevice", &table->context_device);
  table->Load("cuDevicePrimaryCtxRetain", &table->context_retain);
  table->Load("cuThreadExchangeStreamCaptureMode", &table->exchange_capture_mode);
  table->Load("cuCtxGetStreamPriorityRange", &table->priority_range);
  table->Load("cuStreamCreateWithPriority", &table->stream_create);
  table->Load("cuStreamDestroy", &table->stream_destroy);
  table->Load("cuStreamWaitEvent", &table->stream_wait);
  table->Load("cuEventCreate", &table->event_create);
  table->Load("cuEventDestroy", &table->event_destroy);
  table->Load("cuEventElapsedTime", &table->event_elapsed);
  table->Load("cuEventRecord", &table->event_record);
  table->Load("cuEventQuery", &table->event_query);
  table->Load("cuEventSynchronize", &table->event_synchronize);
  table->Load("cuMemcpyDtoHAsync", &table->copy_to_host);
  table->Load("cuMemcpyHtoDAsync", &table->copy_to_device);
  table->Load("cuMemcpy2DAsync", &table->copy_rows);
  table->Load("cuMemHostRegister", &table->host_register);
  table->Load("cuMemHostUnregister", &table->host_unregister);
  table->Find("cuDeviceGetPCIBusId", kVersion, &table->bus_id);
  std::shared_ptr<Driver> driver(new Driver(std::move(table)));
  driver->Check(driver->table_->init(0), "cuInit");
  return driver;
}

Driver::Driver(std::unique_ptr<Table> table) : table_(std::move(table)) {}

void Driver::Check(int result, const char* call) const {
  if (result == kSuccess) return;
  const char* text = nullptr;
  table_->error_string(result, &text);
  const std::string found =
      std::string(text ? text : "unknown error") + " (CUDA error " + std::to_string(result) + ")";
  if (EndsContext(result)) throw ContextLost(call, "", 0, found + kAllIsLost);
  throw Failure(call, "", 0, found);
}

void Driver::CheckCopy(int result, const char* call) const {
  if (result == kInvalidValue) throw Failure(call, "", 0, kNotMapped);
  Check(result, call);
}

CuContext Driver::CurrentContext() const {
  CuContext context = nullptr;
  Check(table_->context_get(&context), "cuCtxGetCurrent");
  return context;
}

CuContext Driver::EnterContext() const {
  CuContext context = CurrentContext();
  if (context == nullptr) {
    Check(table_->context_retain(&context, 0), "cuDevicePrimaryCtxRetain");
    SetContext(context);
  }
  return context;
}

int Driver::CurrentDevice() const {
  int device = 0;
  Check(table_->context_device(&device), "cuCtxGetDevice");
  return device;
}

std::string Driver::CurrentBusId() const noexcept {
  char text[kBusIdBytes] = {};
  int device = 0;
  if (table_->bus_id == nullptr || table_->context_device(&device) != kSuccess ||
      table_->bus_id(text, sizeof text - 1, device) != kSuccess) {
    return "";
  }
  return text;
}

void Driver::SetContext(CuContext context) const { Check(table_->context_set(context), "cuCtxSetCurrent"); }

CuContext Driver::SwapContext(CuContext context) const noexcept {
  CuContext before = nullptr;
  table_->context_get(&before);
  if (before != context) table_->context_set(context);
  return before;
}

void Driver::RelaxCapture() const {
  int mode = kCaptureModeRelaxed;
  Check(table_->exchange_capture_mode(&mode), "cuThreadExchangeStreamCaptureMode");
}

int Driver::SwapCaptureMode(int mode) const noexcept {
  table_->exchange_capture_mode(&mode);
  return mode;
}

RelaxedCapture::RelaxedCapture(const Driver& driver) noexcept
    : driver_(driver), before_(driver.SwapCaptureMode(kCaptureModeRelaxed)) {}

CuStream Driver::CreateLowPriorityStream() const {
  int least = 0, greatest = 0;
  Check(table_->priority_range(&least, &greatest), "cuCtxGetStreamPriorityRange");
  CuStream stream = nullptr;
  Check(table_->stream_create(&stream, kStreamNonBlocking, least), "cuStreamCreateWithPriority");
  return stream;
}

CuEvent Driver::CreateEvent(bool timing) const {
  CuEvent event = nullptr;
  const unsigned flags = kEventBlockingSync | (timing ? 0 : kEventDisableTiming);
  Check(table_->event_create(&event, flags), "cuEventCreate");
  return event;
}

void Driver::DestroyStream(CuStream stream) const noexcept { table_->stream_destroy(stream); }
void Driver::DestroyEvent(CuEvent event) const noexcept { table_->event_destroy(event); }

void Driver::Record(CuEvent event, CuStream stream) const {
  Check(table_->event_record(event, stream), "cuEventRecord");
}

void Driver::StreamWait(CuStream stream, CuEvent event) const {
  Check(table_->stream_wait(stream, event, 0), "cuStreamWaitEvent");
}

void Driver::Synchronize(CuEvent event) const {
  Check(table_->event_synchronize(event), "cuEventSynchronize");
}

bool Driver::Done(CuEvent event) const {
  const int result = table_->event_query(event);
  if (result == kNotReady) return false;
  Check(result, "cuEventQuery");
  return true;
}

float Driver::MillisecondsBetween(CuEvent begin, CuEvent end) const {
  float milliseconds = 0;
  Check(table_->event_elapsed(&milliseconds, begin, end), "cuEventElapsedTime");
  return milliseconds;
}

void Driver::CopyToHost(void* target, CuPointer source, size_t bytes, CuStream stream) const {
  CheckCopy(table_->copy_to_host(target, source, bytes, stream), "cuMemcpyDtoHAsync");
}

void Driver::CopyRowsToHost(void* target, CuPointer source, size_t row_bytes, size_t pitch, size_t rows,
                            CuStream stream) const {
  CopyOfRows copy{};
  copy.source.memory = kMemoryDevice;
  copy.source.device = source;
  copy.source.pitch = pitch;
  copy.target.memory = kMemoryHost;
  copy.target.host = target;
  copy.target.pitch = row_bytes;
  copy.row_bytes = row_bytes;
  copy.rows = rows;
  CheckCopy(table_->copy_rows(&copy, stream), "cuMemcpy2DAsync");
}

void Driver::CopyToDevice(CuPointer target, const void* source, size_t bytes, CuStream stream) const {
  CheckCopy(table_->copy_to_device(target, source, bytes, stream), "cuMemcpyHtoDAsync");
}

void Driver::CopyRowsToDevice(CuPointer target, size_t target_pitch, const void* source, size_t source_pitch,
                              size_t row_bytes, size_t rows, CuStream stream) const {
  CopyOfRows copy{};
  copy.source.memory = kMemoryHost;
  copy.source.host = source;
  copy.source.pitch = source_pitch;
  copy.target.memory = kMemoryDevice;
  copy.target.device = target;
  copy.target.pitch = target_pitch;
  copy.row_bytes = row_bytes;
  copy.rows = rows;
  CheckCopy(table_->copy_rows(&copy, stream), "cuMemcpy2DAsync");
}

void Driver::RegisterHost(void* memory, size_t bytes) const {
  Check(table_->host_register(memory, bytes, kHostRegisterPortable), "cuMemHostRegister");
}

bool Driver::UnregisterHost(void* memory) const noexcept {
  return table_->host_unregister(memory) == kSuccess;
}

}  // namespace datastates
