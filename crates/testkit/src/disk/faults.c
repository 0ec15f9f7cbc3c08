/*
 * Disk faults for the files below one folder of one process. The library is preloaded, so the
 * functions below come before those of libc. A test switches faults by writing a control file,
 * which is mapped into the memory of this process.
 *
 * Without faults, a sync returns at once: a killed process loses nothing that it has written. If
 * `loses_unsynced` is set, the process undoes all writes since the last sync of their file before it
 * kills itself, as if the machine lost its power.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/types.h>
#include <unistd.h>

/* The bits of `kinds`, and the places in `counts`. `mod.rs` has the same order. */
enum kind { FULL, IO, SYNC, TORN, READ, KINDS };

/* The layout of the control file. `mod.rs` writes the same. */
struct control {
    _Atomic uint32_t kinds;
    _Atomic uint32_t per_1024;
    _Atomic uint64_t seed;
    /* The process kills itself at this many further calls; 0 for never. */
    _Atomic uint64_t kill_in;
    _Atomic uint64_t counts[KINDS];
    _Atomic uint64_t loses_unsynced;
};

static struct control *control;
/* Files with this text in their name lose nothing; NULL for none. */
static const char *excepted;
static char folder[4096];
static size_t folder_length;
static _Atomic uint64_t draws;

__attribute__((constructor)) static void begin(void) {
    const char *below = getenv("DISK_FAULTS_FOLDER");
    const char *file = getenv("DISK_FAULTS_CONTROL");
    if (!below || !file || strlen(below) >= sizeof folder) return;
    int fd = open(file, O_RDWR | O_CLOEXEC);
    if (fd < 0) abort();
    void *mapped = mmap(NULL, sizeof *control, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    close(fd);
    if (mapped == MAP_FAILED) abort();
    strcpy(folder, below);
    excepted = getenv("DISK_FAULTS_EXCEPT");
    folder_length = strlen(folder);
    control = mapped;
}

#define REAL(name)                                                    \
    static __typeof__(&name) real;                                    \
    if (!real) real = (__typeof__(&name))dlsym(RTLD_NEXT, #name)

static int is_below(const char *path) {
    return strncmp(path, folder, folder_length) == 0 && path[folder_length] == '/';
}

enum { PATH_BYTES = 4096 };

/* Whether a file is below the folder. Sets `path` to its path. */
static int find_below(int fd, char path[PATH_BYTES]) {
    if (!control) return 0;
    char link[64];
    int error = errno;
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t length = readlink(link, path, PATH_BYTES - 1);
    errno = error;
    if (length < 0) return 0;
    path[length] = 0;
    return is_below(path);
}

static int is_file_below(int fd) {
    char path[PATH_BYTES];
    return find_below(fd, path);
}

static int is_on(enum kind kind) {
    return atomic_load(&control->kinds) >> kind & 1;
}

/* Whether this call fails. The same seed and order of calls give the same faults. */
static int is_drawn(enum kind kind) {
    if (!is_on(kind)) return 0;
    uint64_t x = atomic_load(&control->seed) + atomic_fetch_add(&draws, 1) * 0x9e3779b97f4a7c15u;
    x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9u;
    x = (x ^ x >> 27) * 0x94d049bb133111ebu;
    if (((x ^ x >> 31) & 1023) >= atomic_load(&control->per_1024)) return 0;
    atomic_fetch_add(&control->counts[kind], 1);
    return 1;
}

/* Whether the process is to be killed at this call. */
static int is_last(void) {
    uint64_t left = atomic_load(&control->kill_in);
    while (left > 0) {
        if (atomic_compare_exchange_weak(&control->kill_in, &left, left - 1)) return left == 1;
    }
    return 0;
}

/* What a file had before a write that is not synced. */
struct unsynced {
    struct unsynced *next;
    ino_t file;
    off_t size, at;
    size_t length;
    char *bytes;
    char path[];
};

/* The latest first. */
static struct unsynced *unsynced;
static pthread_mutex_t unsynced_lock = PTHREAD_MUTEX_INITIALIZER;

/* Keeps what a change of a part of a file overwrites or cuts off. */
static void keep(int fd, off_t at, size_t length) {
    char path[PATH_BYTES];
    struct stat stat;
    if (!control || !atomic_load(&control->loses_unsynced) || !find_below(fd, path)) return;
    /* Other threads have a file of shared memory mapped, so it must not be cut. */
    if (strstr(path, "-shm")) return;
    if ((excepted && strstr(path, excepted)) || fstat(fd, &stat) != 0 || !S_ISREG(stat.st_mode)) return;
    REAL(pread);
    size_t old = at >= stat.st_size ? 0 : (size_t)(stat.st_size - at);
    if (old > length) old = length;
    struct unsynced *kept = malloc(sizeof *kept + strlen(path) + 1);
    char *bytes = malloc(old ? old : 1);
    if (!kept || !bytes) abort();
    /* The file may be open for writes only. */
    int reading = open(path, O_RDONLY | O_CLOEXEC);
    if (reading < 0 || real(reading, bytes, old, at) != (ssize_t)old) abort();
    close(reading);
    *kept = (struct unsynced){.file = stat.st_ino, .size = stat.st_size, .at = at, .length = old, .bytes = bytes};
    strcpy(kept->path, path);
    pthread_mutex_lock(&unsynced_lock);
    kept->next = unsynced;
    unsynced = kept;
    pthread_mutex_unlock(&unsynced_lock);
}

/* Forgets the writes of a file that is synced or removed. */
static void forget(ino_t file) {
    pthread_mutex_lock(&unsynced_lock);
    for (struct unsynced **at = &unsynced; *at;) {
        struct unsynced *kept = *at;
        if (kept->file == file) {
            *at = kept->next;
            free(kept->bytes);
            free(kept);
        } else {
            at = &kept->next;
        }
    }
    pthread_mutex_unlock(&unsynced_lock);
}

static void undo(const struct unsynced *kept) {
    struct stat stat;
    REAL(pwrite);
    int fd = open(kept->path, O_WRONLY | O_CLOEXEC);
    if (fd < 0) return;
    if (fstat(fd, &stat) == 0 && stat.st_ino == kept->file) {
        int cut = (int)syscall(SYS_ftruncate, fd, kept->size);
        if (cut != 0 || real(fd, kept->bytes, kept->length, kept->at) != (ssize_t)kept->length) abort();
    }
    close(fd);
}

/* Other threads cannot write any more: the lock is never given back. */
static void die(void) {
    pthread_mutex_lock(&unsynced_lock);
    for (const struct unsynced *kept = unsynced; kept; kept = kept->next) undo(kept);
    kill(getpid(), SIGKILL);
    for (;;) pause();
}

/* Whether a write up to this end needs room on the disk. */
static int grows(int fd, off_t end) {
    struct stat stat;
    return fstat(fd, &stat) == 0 && end > stat.st_size;
}

/* The error of a write, or 0. Sets `*part` to the bytes that are written all the same. */
static int write_error(int fd, size_t length, off_t end, size_t *part) {
    *part = 0;
    if (is_last()) {
        *part = length / 2;
        return -1;
    }
    if (is_drawn(IO)) return EIO;
    if (is_drawn(TORN)) {
        *part = length / 2;
        return ENOSPC;
    }
    if (is_on(FULL) && grows(fd, end) && is_drawn(FULL)) return ENOSPC;
    return 0;
}

static ssize_t pwrite_with_faults(ssize_t (*real)(int, const void *, size_t, off_t), int fd, const void *bytes,
                                  size_t length, off_t at) {
    size_t part;
    keep(fd, at, length);
    int error = is_file_below(fd) ? write_error(fd, length, at + (off_t)length, &part) : 0;
    if (!error) return real(fd, bytes, length, at);
    if (part) (void)!real(fd, bytes, part, at);
    if (error < 0) die();
    errno = error;
    return -1;
}

ssize_t pwrite(int fd, const void *bytes, size_t length, off_t at) {
    REAL(pwrite);
    return pwrite_with_faults(real, fd, bytes, length, at);
}

ssize_t pwrite64(int fd, const void *bytes, size_t length, off64_t at) {
    REAL(pwrite64);
    return pwrite_with_faults(real, fd, bytes, length, at);
}

ssize_t write(int fd, const void *bytes, size_t length) {
    REAL(write);
    size_t part;
    int error = 0;
    if (is_file_below(fd)) {
        off_t at = lseek(fd, 0, SEEK_CUR);
        keep(fd, at, length);
        error = write_error(fd, length, at + (off_t)length, &part);
    }
    if (!error) return real(fd, bytes, length);
    if (part) (void)!real(fd, bytes, part);
    if (error < 0) die();
    errno = error;
    return -1;
}

static int sync_with_faults(int (*real)(int), int fd) {
    if (!is_file_below(fd)) return real(fd);
    if (is_last()) die();
    if (is_drawn(SYNC)) {
        errno = EIO;
        return -1;
    }
    struct stat stat;
    if (fstat(fd, &stat) == 0) forget(stat.st_ino);
    return 0;
}

int fsync(int fd) {
    REAL(fsync);
    return sync_with_faults(real, fd);
}

int fdatasync(int fd) {
    REAL(fdatasync);
    return sync_with_faults(real, fd);
}

/* The error of a change of the length, or 0. */
static int length_error(int fd, off_t length) {
    if (!is_file_below(fd)) return 0;
    keep(fd, length, SIZE_MAX);
    if (is_last()) die();
    if (is_drawn(IO)) return EIO;
    return is_on(FULL) && grows(fd, length) && is_drawn(FULL) ? ENOSPC : 0;
}

int ftruncate(int fd, off_t length) {
    REAL(ftruncate);
    int error = length_error(fd, length);
    if (!error) return real(fd, length);
    errno = error;
    return -1;
}

int ftruncate64(int fd, off64_t length) {
    REAL(ftruncate64);
    int error = length_error(fd, length);
    if (!error) return real(fd, length);
    errno = error;
    return -1;
}

int fallocate(int fd, int mode, off_t at, off_t length) {
    REAL(fallocate);
    int error = length_error(fd, at + length);
    if (!error) return real(fd, mode, at, length);
    errno = error;
    return -1;
}

int fallocate64(int fd, int mode, off64_t at, off64_t length) {
    REAL(fallocate64);
    int error = length_error(fd, at + length);
    if (!error) return real(fd, mode, at, length);
    errno = error;
    return -1;
}

/* These return the error. */
int posix_fallocate(int fd, off_t at, off_t length) {
    REAL(posix_fallocate);
    int error = length_error(fd, at + length);
    return error ? error : real(fd, at, length);
}

int posix_fallocate64(int fd, off64_t at, off64_t length) {
    REAL(posix_fallocate64);
    int error = length_error(fd, at + length);
    return error ? error : real(fd, at, length);
}

int unlink(const char *path) {
    REAL(unlink);
    struct stat file;
    int is_known = control && is_below(path) && stat(path, &file) == 0;
    int done = real(path);
    if (done == 0 && is_known) forget(file.st_ino);
    return done;
}

static int read_fails(int fd) {
    if (!control || !is_on(READ) || !is_file_below(fd) || !is_drawn(READ)) return 0;
    errno = EIO;
    return 1;
}

ssize_t read(int fd, void *bytes, size_t length) {
    REAL(read);
    return read_fails(fd) ? -1 : real(fd, bytes, length);
}

ssize_t pread(int fd, void *bytes, size_t length, off_t at) {
    REAL(pread);
    return read_fails(fd) ? -1 : real(fd, bytes, length, at);
}

ssize_t pread64(int fd, void *bytes, size_t length, off64_t at) {
    REAL(pread64);
    return read_fails(fd) ? -1 : real(fd, bytes, length, at);
}

/* Whether a new file finds no room. */
static int cannot_create(const char *path, int flags) {
    if (!control || !(flags & O_CREAT) || !is_on(FULL) || !is_below(path)) return 0;
    if (access(path, F_OK) == 0) return 0;
    if (!is_drawn(FULL)) {
        errno = 0;
        return 0;
    }
    errno = ENOSPC;
    return 1;
}

#define MODE(flags)                                    \
    mode_t mode = 0;                                   \
    if ((flags) & (O_CREAT | O_TMPFILE)) {             \
        va_list arguments;                             \
        va_start(arguments, flags);                    \
        mode = va_arg(arguments, mode_t);              \
        va_end(arguments);                             \
    }

int open(const char *path, int flags, ...) {
    REAL(open);
    MODE(flags)
    return cannot_create(path, flags) ? -1 : real(path, flags, mode);
}

int open64(const char *path, int flags, ...) {
    REAL(open64);
    MODE(flags)
    return cannot_create(path, flags) ? -1 : real(path, flags, mode);
}

int openat(int at, const char *path, int flags, ...) {
    REAL(openat);
    MODE(flags)
    return cannot_create(path, flags) ? -1 : real(at, path, flags, mode);
}

int openat64(int at, const char *path, int flags, ...) {
    REAL(openat64);
    MODE(flags)
    return cannot_create(path, flags) ? -1 : real(at, path, flags, mode);
}
