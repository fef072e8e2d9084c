/* A libnvidia-ml.so.1 for tests: the part of NVML that envplan calls, over GPUs that are a file.
 *
 * The file named by ENVPLAN_FAKE_NVML is mapped into every process that loads this library, so all
 * of them see the same GPUs. Clocks hold what was last set, energy grows with a power model over
 * real time, calls that change clocks are logged, and each kind of call can be made to fail.
 * tests/fake_nvml.py is the other side: it mirrors `struct state` field by field.
 *
 * A process may be killed anywhere in here. The lock is therefore the kernel's (fcntl), which the
 * kernel lets go of with the process.
 */

#include <fcntl.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

enum {
  SUCCESS = 0,
  UNINITIALIZED = 1,
  INVALID_ARGUMENT = 2,
  NOT_SUPPORTED = 3,
  NO_PERMISSION = 4,
  INSUFFICIENT_SIZE = 7,
  DRIVER_NOT_LOADED = 9,
};

enum { MAX_GPUS = 16, MAX_CLOCKS = 256, MAX_LOG = 65536, TEXT = 96, MAX_PROCESSES = 8 };

/* Kinds of calls: each can be made to fail on its own. */
enum { INIT, LOCK, RESET, ENERGY, POWER, CLOCK, THROTTLE, LIMIT, HANDLE, KINDS };

struct fault {
  int32_t code;      /* the nvmlReturn_t to fail with; 0: do not fail */
  int32_t remaining; /* how many more calls may fail; below 0: no end */
  double probability;
};

struct gpu {
  char name[TEXT];
  char uuid[TEXT];
  int32_t num_clocks;
  int32_t clocks[MAX_CLOCKS]; /* MHz, descending */
  int32_t memory_clock;
  int32_t permission;     /* 1: all users may change clocks; 2: root may; 0: nobody */
  int32_t energy_counter; /* 1: there is one */
  int32_t mig;
  int32_t locked;   /* MHz, or 0: the driver chooses */
  int32_t boost;    /* MHz that the driver chooses; 0: the highest */
  int32_t earlier;  /* MHz, the clock until due_time */
  int32_t stuck;    /* MHz that it runs at whatever is set; 0: it follows */
  uint32_t hang;    /* bit k: calls of kind k do not return */
  int64_t due_time; /* ns, CLOCK_MONOTONIC: when the clock that was set last is there */
  /* How long a clock takes to come once it is set, ns, and by how much that varies at most. */
  int64_t clock_delay_ns, clock_jitter_ns;
  uint64_t throttle;
  uint64_t lock_delay_ns;  /* how long setting a clock takes */
  uint64_t energy_step_ns; /* how often the counter is updated; 0: always */
  double power_limit;      /* W */
  /* P(f) = static_power + activity * dynamic * f * v^2, v = 1 + slope * max(0, f - knee); up to
   * the power limit. The same model as envplan.devices.modelled. */
  double static_power, dynamic, knee, slope, activity;
  double energy;                     /* mJ, up to energy_time */
  double counter;                    /* mJ, what the counter shows */
  int64_t energy_time, counter_time; /* ns, CLOCK_MONOTONIC */
  struct fault faults[KINDS];
  int32_t num_processes; /* that compute on it */
  int32_t processes[MAX_PROCESSES];
};

struct entry {
  int64_t time; /* ns, CLOCK_MONOTONIC */
  int64_t due;  /* when the clock is there, ns; of other calls 0 */
  int32_t pid, gpu, kind, mhz, result, before;
};

struct state {
  char driver[TEXT];
  int32_t num_gpus;
  int32_t log_size; /* calls ever logged; entry k is at k modulo MAX_LOG */
  uint64_t random;
  struct gpu gpus[MAX_GPUS];
  struct entry log[MAX_LOG];
};

/* Tests look for this name before they let anything set a clock. */
const int envplan_fake_nvml = sizeof(struct state);

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static struct state* state;
static int file = -1;
static int users;
static char mapped[4096];

static int64_t now(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec * INT64_C(1000000000) + t.tv_nsec;
}

static void enter(void) {
  struct flock lock = {.l_type = F_WRLCK, .l_whence = SEEK_SET};
  pthread_mutex_lock(&mutex);
  while (file >= 0 && fcntl(file, F_SETLKW, &lock) != 0) continue;
}

static void leave(void) {
  struct flock lock = {.l_type = F_UNLCK, .l_whence = SEEK_SET};
  if (file >= 0) fcntl(file, F_SETLK, &lock);
  pthread_mutex_unlock(&mutex);
}

/* A random number from 0 to 1. */
static double draw(void) {
  state->random ^= state->random << 13;
  state->random ^= state->random >> 7;
  state->random ^= state->random << 17;
  return (double)(state->random >> 11) / 9007199254740992.0;
}

/* Whether this call shall fail, and how. */
static int fault(struct fault* f) {
  if (f->code == 0 || f->remaining == 0) return SUCCESS;
  if (draw() >= f->probability) return SUCCESS;
  if (f->remaining > 0) f->remaining--;
  return f->code;
}

static double power_at(const struct gpu* gpu, double mhz) {
  double over = mhz > gpu->knee ? mhz - gpu->knee : 0.0;
  double v = 1.0 + gpu->slope * over;
  double power = gpu->static_power + gpu->activity * gpu->dynamic * mhz * v * v;
  return power < gpu->power_limit ? power : gpu->power_limit;
}

static int clock_at(const struct gpu* gpu, int64_t time) {
  if (gpu->stuck) return gpu->stuck;
  if (gpu->earlier && time < gpu->due_time) return gpu->earlier;
  return gpu->locked ? gpu->locked : gpu->boost ? gpu->boost : gpu->clocks[0];
}

static int clock_now(const struct gpu* gpu) { return clock_at(gpu, now()); }

static int may_set(const struct gpu* gpu) {
  return gpu->permission == 1 || (gpu->permission == 2 && geteuid() == 0);
}

/* Account for the energy up to a moment before which the clock does not change. */
static void spend_until(struct gpu* gpu, int64_t time) {
  int mhz = clock_at(gpu, gpu->energy_time);
  gpu->energy += power_at(gpu, mhz) * (double)(time - gpu->energy_time) * 1e-6;
  gpu->energy_time = time;
}

/* Bring energy and counter up to this moment. */
static void advance(struct gpu* gpu) {
  int64_t t = now();
  if (gpu->energy_time < gpu->due_time && gpu->due_time < t) spend_until(gpu, gpu->due_time);
  spend_until(gpu, t);
  if ((uint64_t)(t - gpu->counter_time) >= gpu->energy_step_ns) {
    gpu->counter = gpu->energy;
    gpu->counter_time = t;
  }
}

static void record(int kind, int index, int mhz, int result) {
  struct entry* entry = &state->log[state->log_size % MAX_LOG];
  const struct gpu* gpu = &state->gpus[index];
  int sets_clock = kind != LIMIT;
  *entry = (struct entry){.time = now(),
                          .due = sets_clock ? gpu->due_time : 0,
                          .pid = getpid(),
                          .gpu = index,
                          .kind = kind,
                          .mhz = mhz,
                          .result = result,
                          .before = sets_clock ? gpu->earlier : 0};
  state->log_size++;
}

/* Set the clock, MHz, or 0. It is there after the delay; until then the clock stays what it is,
 * also where that one had been on its way itself. */
static void set_clock(struct gpu* gpu, int mhz) {
  double jitter = (2.0 * draw() - 1.0) * (double)gpu->clock_jitter_ns;
  int64_t delay = gpu->clock_delay_ns + (int64_t)jitter;
  advance(gpu);
  gpu->earlier = clock_at(gpu, gpu->energy_time);
  gpu->due_time = gpu->energy_time + (delay > 0 ? delay : 0);
  gpu->locked = mhz;
}

/* Handles are 1-based indices. */
static struct gpu* find(void* handle) {
  intptr_t index = (intptr_t)handle - 1;
  if (state == NULL || index < 0 || index >= state->num_gpus) return NULL;
  return &state->gpus[index];
}

/* Wait for as long as calls of a kind hang on a GPU. */
static void hang(const struct gpu* gpu, int kind) {
  const volatile uint32_t* kinds = gpu ? &gpu->hang : NULL;
  struct timespec pause = {0, 1000000};
  while (kinds && kind >= 0 && (*kinds >> kind & 1)) nanosleep(&pause, NULL);
}

/* Start a call on a GPU: `gpu` is it, or the call returns. Every BEGIN is followed by END. */
#define BEGIN(kind)                              \
  if (users == 0) return UNINITIALIZED;          \
  struct gpu* gpu = find(handle);                \
  hang(gpu, (kind));                             \
  enter();                                       \
  int result = gpu ? SUCCESS : INVALID_ARGUMENT; \
  if (gpu && (kind) >= 0) result = fault(&gpu->faults[(kind)])

#define END \
  leave();  \
  return result

static int map_state(void) {
  const char* path = getenv("ENVPLAN_FAKE_NVML");
  if (path == NULL || *path == 0) return DRIVER_NOT_LOADED;
  if (state != NULL && strcmp(path, mapped) == 0) return SUCCESS;
  int descriptor = open(path, O_RDWR | O_CLOEXEC);
  if (descriptor < 0) return DRIVER_NOT_LOADED;
  void* memory =
      mmap(NULL, sizeof(struct state), PROT_READ | PROT_WRITE, MAP_SHARED, descriptor, 0);
  if (memory == MAP_FAILED) {
    close(descriptor);
    return DRIVER_NOT_LOADED;
  }
  if (state != NULL) munmap(state, sizeof(struct state));
  if (file >= 0) close(file);
  state = memory;
  file = descriptor;
  snprintf(mapped, sizeof mapped, "%s", path);
  return SUCCESS;
}

int nvmlInitWithFlags(unsigned flags) {
  (void)flags;
  pthread_mutex_lock(&mutex);
  int result = map_state();
  pthread_mutex_unlock(&mutex);
  if (result != SUCCESS) return result;
  hang(&state->gpus[0], INIT);
  enter();
  result = fault(&state->gpus[0].faults[INIT]);
  if (result == SUCCESS) users++;
  leave();
  return result;
}

int nvmlInit_v2(void) { return nvmlInitWithFlags(0); }

int nvmlShutdown(void) {
  enter();
  int result = users > 0 ? SUCCESS : UNINITIALIZED;
  if (users > 0) users--;
  leave();
  return result;
}

const char* nvmlErrorString(int result) {
  switch (result) {
    case SUCCESS:
      return "Success";
    case UNINITIALIZED:
      return "Uninitialized";
    case INVALID_ARGUMENT:
      return "Invalid Argument";
    case NOT_SUPPORTED:
      return "Not Supported";
    case NO_PERMISSION:
      return "Insufficient Permissions";
    case INSUFFICIENT_SIZE:
      return "Insufficient Size";
    case DRIVER_NOT_LOADED:
      return "Driver Not Loaded";
    case 15:
      return "GPU is lost";
    default:
      return "Unknown Error";
  }
}

static int copy_text(char* out, unsigned size, const char* text) {
  if (strlen(text) >= size) return INSUFFICIENT_SIZE;
  strcpy(out, text);
  return SUCCESS;
}

int nvmlSystemGetDriverVersion(char* out, unsigned size) {
  return users ? copy_text(out, size, state->driver) : UNINITIALIZED;
}

int nvmlDeviceGetCount_v2(unsigned* count) {
  if (users == 0) return UNINITIALIZED;
  *count = (unsigned)state->num_gpus;
  return SUCCESS;
}

int nvmlDeviceGetHandleByIndex_v2(unsigned index, void** handle) {
  if (users == 0) return UNINITIALIZED;
  if ((int)index >= state->num_gpus) return INVALID_ARGUMENT;
  hang(&state->gpus[index], HANDLE);
  enter();
  int result = fault(&state->gpus[index].faults[HANDLE]);
  leave();
  *handle = (void*)((intptr_t)index + 1);
  return result;
}

int nvmlDeviceGetName(void* handle, char* out, unsigned size) {
  BEGIN(-1);
  if (result == SUCCESS) result = copy_text(out, size, gpu->name);
  END;
}

int nvmlDeviceGetUUID(void* handle, char* out, unsigned size) {
  BEGIN(-1);
  if (result == SUCCESS) result = copy_text(out, size, gpu->uuid);
  END;
}

/* As in nvml.h. GPU k is at 0000:(k + 1):00.0. */
struct pci_info {
  char legacy[16];
  unsigned domain, bus, device, id, subsystem;
  char address[32];
};

int nvmlDeviceGetPciInfo_v3(void* handle, struct pci_info* pci) {
  BEGIN(-1);
  if (result == SUCCESS) {
    memset(pci, 0, sizeof *pci);
    pci->bus = (unsigned)(gpu - state->gpus) + 1;
    snprintf(pci->legacy, sizeof pci->legacy, "0000:%02X:00.0", pci->bus);
    snprintf(pci->address, sizeof pci->address, "00000000:%02X:00.0", pci->bus);
  }
  END;
}

int nvmlDeviceGetMigMode(void* handle, unsigned* current, unsigned* pending) {
  BEGIN(-1);
  if (result == SUCCESS) *current = *pending = (unsigned)gpu->mig;
  END;
}

/* As nvml.h has it since driver 535. */
struct process_info {
  unsigned pid;
  unsigned long long memory;
  unsigned gpu_instance, compute_instance;
};

int nvmlDeviceGetComputeRunningProcesses_v3(void* handle, unsigned* count,
                                            struct process_info* infos) {
  BEGIN(-1);
  if (result == SUCCESS) {
    unsigned size = infos == NULL ? 0 : *count;
    *count = (unsigned)gpu->num_processes;
    if (size < *count) result = INSUFFICIENT_SIZE;
    for (unsigned k = 0; result == SUCCESS && k < *count; k++) {
      struct process_info info = {.pid = (unsigned)gpu->processes[k]};
      infos[k] = info;
    }
  }
  END;
}

int nvmlDeviceGetSupportedMemoryClocks(void* handle, unsigned* count, unsigned* clocks) {
  BEGIN(-1);
  if (result == SUCCESS) {
    result = clocks == NULL || *count < 1 ? INSUFFICIENT_SIZE : SUCCESS;
    *count = 1;
    if (result == SUCCESS) clocks[0] = (unsigned)gpu->memory_clock;
  }
  END;
}

int nvmlDeviceGetSupportedGraphicsClocks(void* handle, unsigned memory, unsigned* count,
                                         unsigned* clocks) {
  BEGIN(-1);
  if (result == SUCCESS && memory != (unsigned)gpu->memory_clock) result = INVALID_ARGUMENT;
  if (result == SUCCESS) {
    unsigned size = clocks == NULL ? 0 : *count;
    *count = (unsigned)gpu->num_clocks;
    if (size < *count) result = INSUFFICIENT_SIZE;
    for (unsigned k = 0; result == SUCCESS && k < *count; k++) clocks[k] = (unsigned)gpu->clocks[k];
  }
  END;
}

/* Clock types: 0 graphics, 1 SM, 2 memory, 3 video. */
int nvmlDeviceGetClockInfo(void* handle, int type, unsigned* mhz) {
  BEGIN(CLOCK);
  if (result == SUCCESS) *mhz = (unsigned)(type == 2 ? gpu->memory_clock : clock_now(gpu));
  END;
}

int nvmlDeviceGetMaxClockInfo(void* handle, int type, unsigned* mhz) {
  BEGIN(-1);
  if (result == SUCCESS) *mhz = (unsigned)(type == 2 ? gpu->memory_clock : gpu->clocks[0]);
  END;
}

int nvmlDeviceGetPowerManagementLimit(void* handle, unsigned* milliwatts) {
  BEGIN(-1);
  if (result == SUCCESS) *milliwatts = (unsigned)(gpu->power_limit * 1e3);
  END;
}

int nvmlDeviceSetPowerManagementLimit(void* handle, unsigned milliwatts) {
  BEGIN(LIMIT);
  if (result == SUCCESS && !may_set(gpu)) result = NO_PERMISSION;
  if (result == SUCCESS) {
    advance(gpu);
    gpu->power_limit = milliwatts * 1e-3;
  }
  if (gpu) record(LIMIT, (int)(gpu - state->gpus), (int)(milliwatts / 1000), result);
  END;
}

int nvmlDeviceGetPowerUsage(void* handle, unsigned* milliwatts) {
  BEGIN(POWER);
  if (result == SUCCESS) *milliwatts = (unsigned)(power_at(gpu, clock_now(gpu)) * 1e3 + 0.5);
  END;
}

int nvmlDeviceGetTotalEnergyConsumption(void* handle, unsigned long long* millijoules) {
  BEGIN(ENERGY);
  if (result == SUCCESS && !gpu->energy_counter) result = NOT_SUPPORTED;
  if (result == SUCCESS) {
    advance(gpu);
    *millijoules = (unsigned long long)gpu->counter;
  }
  END;
}

int nvmlDeviceGetCurrentClocksEventReasons(void* handle, unsigned long long* reasons) {
  BEGIN(THROTTLE);
  if (result == SUCCESS) *reasons = gpu->throttle;
  END;
}

int nvmlDeviceGetCurrentClocksThrottleReasons(void* handle, unsigned long long* reasons) {
  return nvmlDeviceGetCurrentClocksEventReasons(handle, reasons);
}

static void dawdle(void* handle) {
  struct gpu* gpu = find(handle);
  if (gpu == NULL || gpu->lock_delay_ns == 0) return;
  struct timespec delay = {(time_t)(gpu->lock_delay_ns / 1000000000),
                           (long)(gpu->lock_delay_ns % 1000000000)};
  nanosleep(&delay, NULL);
}

int nvmlDeviceSetGpuLockedClocks(void* handle, unsigned lowest, unsigned highest) {
  dawdle(handle);
  BEGIN(LOCK);
  if (result == SUCCESS && !may_set(gpu)) result = NO_PERMISSION;
  if (result == SUCCESS && lowest > highest) result = INVALID_ARGUMENT;
  if (result == SUCCESS) {
    /* The highest supported clock in the range, or the lowest there is. */
    int mhz = gpu->clocks[gpu->num_clocks - 1];
    for (int k = gpu->num_clocks - 1; k >= 0; k--)
      if ((unsigned)gpu->clocks[k] <= highest) mhz = gpu->clocks[k];
    set_clock(gpu, mhz);
  }
  if (gpu) record(LOCK, (int)(gpu - state->gpus), (int)highest, result);
  END;
}

int nvmlDeviceResetGpuLockedClocks(void* handle) {
  dawdle(handle);
  BEGIN(RESET);
  if (result == SUCCESS && !may_set(gpu)) result = NO_PERMISSION;
  if (result == SUCCESS) set_clock(gpu, 0);
  if (gpu) record(RESET, (int)(gpu - state->gpus), 0, result);
  END;
}
