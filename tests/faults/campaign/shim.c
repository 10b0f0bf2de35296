// A disk that fails on request: LD_PRELOADed, it stands before the system calls that change files.
//
// Nothing happens until shim_arm(directory, plan), and then only to paths under that directory. A plan is a
// list of `call/part/nth/effect`, separated by `;`: at the nth call (`3`: the third; `3+`: from the third on)
// with `part` in its path the effect happens. Effects: the number of an errno, `short` (about half of the
// bytes are written), and for close an errno after it has closed. `shim_hits(n)` is how often entry n had its
// effect.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

#define MOST_ENTRIES 16
#define SHORT (-1)
#define GONE (-2)

struct Entry {
  char call[24], part[64];
  long nth, calls, hits;
  int onward, effect;
};

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static struct Entry entries[MOST_ENTRIES];  // guarded by mutex, as all below
static int count;
static char root[PATH_MAX];
static volatile int armed;

int shim_arm(const char* directory, const char* plan) {
  pthread_mutex_lock(&mutex);
  char* copy = strdup(plan);
  char* rest = NULL;
  count = 0;
  snprintf(root, sizeof root, "%s", directory);
  for (char* word = strtok_r(copy, ";", &rest); word && count < MOST_ENTRIES;
       word = strtok_r(NULL, ";", &rest)) {
    struct Entry entry = {.calls = 0};
    char nth[16], effect[16];
    if (sscanf(word, "%23[^/]/%63[^/]/%15[^/]/%15s", entry.call, entry.part, nth, effect) != 4) {
      count = -1;
      break;
    }
    entry.nth = atol(nth);
    entry.onward = strchr(nth, '+') != NULL;
    entry.effect = strcmp(effect, "short") == 0 ? SHORT : strcmp(effect, "gone") == 0 ? GONE : atoi(effect);
    entries[count++] = entry;
  }
  free(copy);
  const int read = count;
  if (count < 0) count = 0;
  armed = count > 0;
  pthread_mutex_unlock(&mutex);
  return read;
}

long shim_hits(int entry) { return entry < count ? entries[entry].hits : -1; }

// What must happen to this call: 0, an errno, or SHORT.
static int Effect(const char* call, const char* path) {
  if (path == NULL) return 0;
  int effect = 0;
  pthread_mutex_lock(&mutex);
  const size_t length = strlen(root);
  if (armed && strncmp(path, root, length) == 0) {
    for (int i = 0; i < count; ++i) {
      struct Entry* entry = &entries[i];
      if (strcmp(entry->call, call) != 0) continue;
      if (strcmp(entry->part, "*") != 0 && strstr(path + length, entry->part) == NULL) continue;
      ++entry->calls;
      if (entry->calls == entry->nth || (entry->onward && entry->calls > entry->nth)) {
        ++entry->hits;
        effect = entry->effect;
      }
    }
  }
  pthread_mutex_unlock(&mutex);
  return effect;
}

static int EffectOn(const char* call, int fd) {
  if (!armed) return 0;
  char link[64], path[PATH_MAX];
  const int saved = errno;
  snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
  const ssize_t length = readlink(link, path, sizeof path - 1);
  errno = saved;
  if (length <= 0) return 0;
  path[length] = 0;
  return Effect(call, path);
}

// About half; of what may be direct I/O a multiple of its alignment, and all if there is none.
static size_t Half(size_t bytes) {
  if (bytes >= 8192) return bytes / 2 / 4096 * 4096;
  return bytes % 512 == 0 || bytes < 2 ? bytes : bytes / 2;
}

#define REAL(type, name, ...)       \
  static type (*real)(__VA_ARGS__); \
  if (!real) real = (type (*)(__VA_ARGS__))dlsym(RTLD_NEXT, name)
#define FAIL_IF(effect) \
  if ((effect) > 0) {   \
    errno = (effect);   \
    return -1;          \
  }

ssize_t write(int fd, const void* data, size_t bytes) {
  REAL(ssize_t, "write", int, const void*, size_t);
  const int effect = EffectOn("write", fd);
  FAIL_IF(effect);
  return real(fd, data, effect == SHORT ? Half(bytes) : bytes);
}

#define PWRITE(name)                                                      \
  ssize_t name(int fd, const void* data, size_t bytes, off_t offset) {    \
    REAL(ssize_t, #name, int, const void*, size_t, off_t);                \
    const int effect = EffectOn("pwrite", fd);                            \
    FAIL_IF(effect);                                                      \
    return real(fd, data, effect == SHORT ? Half(bytes) : bytes, offset); \
  }
PWRITE(pwrite)
PWRITE(pwrite64)

#define PWRITEV(name)                                                                    \
  ssize_t name(int fd, const struct iovec* parts, int number, off_t offset) {            \
    REAL(ssize_t, #name, int, const struct iovec*, int, off_t);                          \
    const int effect = EffectOn("pwrite", fd);                                           \
    FAIL_IF(effect);                                                                     \
    return real(fd, parts, effect == SHORT && number > 1 ? number / 2 : number, offset); \
  }
PWRITEV(pwritev)
PWRITEV(pwritev64)

static int IsDirectory(int fd) {
  struct stat facts;
  return fstat(fd, &facts) == 0 && S_ISDIR(facts.st_mode);
}

static void Remove(int fd) {
  char link[64], path[PATH_MAX];
  snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
  const ssize_t length = readlink(link, path, sizeof path - 1);
  if (length <= 0) return;
  path[length] = 0;
  unlinkat(AT_FDCWD, path, 0);  // the real one
}

#define SYNC(name)                                                           \
  int name(int fd) {                                                         \
    REAL(int, #name, int);                                                   \
    const int effect = EffectOn(IsDirectory(fd) ? "fsyncdir" : "fsync", fd); \
    FAIL_IF(effect);                                                         \
    const int result = real(fd);                                             \
    if (effect == GONE) Remove(fd);                                          \
    return result;                                                           \
  }
SYNC(fsync)
SYNC(fdatasync)

#define TRUNCATE(name)                            \
  int name(int fd, off_t bytes) {                 \
    REAL(int, #name, int, off_t);                 \
    const int effect = EffectOn("ftruncate", fd); \
    FAIL_IF(effect);                              \
    return real(fd, bytes);                       \
  }
TRUNCATE(ftruncate)
TRUNCATE(ftruncate64)

#define ALLOCATE(name)                                    \
  int name(int fd, int mode, off_t offset, off_t bytes) { \
    REAL(int, #name, int, int, off_t, off_t);             \
    const int effect = EffectOn("fallocate", fd);         \
    FAIL_IF(effect);                                      \
    return real(fd, mode, offset, bytes);                 \
  }
ALLOCATE(fallocate)
ALLOCATE(fallocate64)

// Only what opens to write, and directories (to sync them).
static int OpenEffect(const char* path, int flags) {
  if (!armed) return 0;
  if (flags & O_DIRECTORY) return Effect("opendir", path);
  return flags & (O_WRONLY | O_RDWR | O_CREAT) ? Effect("open", path) : 0;
}

#define MODE_OF(flags)                     \
  mode_t mode = 0;                         \
  if ((flags) & (O_CREAT | __O_TMPFILE)) { \
    va_list rest;                          \
    va_start(rest, flags);                 \
    mode = va_arg(rest, mode_t);           \
    va_end(rest);                          \
  }

#define OPEN(name)                              \
  int name(const char* path, int flags, ...) {  \
    REAL(int, #name, const char*, int, ...);    \
    MODE_OF(flags);                             \
    const int effect = OpenEffect(path, flags); \
    FAIL_IF(effect);                            \
    return real(path, flags, mode);             \
  }
OPEN(open)
OPEN(open64)

#define OPENAT(name)                                   \
  int name(int at, const char* path, int flags, ...) { \
    REAL(int, #name, int, const char*, int, ...);      \
    MODE_OF(flags);                                    \
    const int effect = OpenEffect(path, flags);        \
    FAIL_IF(effect);                                   \
    return real(at, path, flags, mode);                \
  }
OPENAT(openat)
OPENAT(openat64)

int rename(const char* from, const char* to) {
  REAL(int, "rename", const char*, const char*);
  const int effect = armed ? Effect("rename", to) : 0;
  FAIL_IF(effect);
  return real(from, to);
}

int unlink(const char* path) {
  REAL(int, "unlink", const char*);
  const int effect = armed ? Effect("unlink", path) : 0;
  FAIL_IF(effect);
  return real(path);
}

int close(int fd) {
  REAL(int, "close", int);
  const int effect = EffectOn("close", fd);
  const int result = real(fd);
  FAIL_IF(effect);
  return result;
}
