/* A failing disk: preloaded, it counts the calls that change files below one folder and makes one of them fail, or
   kills the process there with a signal (a negative error).

   It counts only after `hostile_arm`, in the process that called it. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

static char folder[PATH_MAX], count_path[PATH_MAX];
static long failing_call, calls;
static int failing_error, fault_lasts;
static pid_t armed;

static ssize_t (*real_write)(int, const void *, size_t);
static int (*real_open)(const char *, int, ...);

__attribute__((constructor)) static void find(void) {
    real_write = dlsym(RTLD_NEXT, "write");
    real_open = dlsym(RTLD_NEXT, "open64");
}

void hostile_arm(const char *below, long call, int error, int lasts, const char *count) {
    strncpy(folder, below, sizeof folder - 1);
    strncpy(count_path, count, sizeof count_path - 1);
    failing_call = call;
    failing_error = error;
    fault_lasts = lasts;
    calls = 0;
    armed = getpid();
}

/* Whether this call is to fail. */
static int fails(const char *path) {
    if (!armed || armed != getpid() || strncmp(path, folder, strlen(folder)) != 0) return 0;
    long number = __atomic_add_fetch(&calls, 1, __ATOMIC_SEQ_CST);
    if (count_path[0]) {
        char text[32];
        int file = real_open(count_path, O_WRONLY | O_CREAT | O_TRUNC, 0644);
        int length = snprintf(text, sizeof text, "%ld\n", number);
        if (file >= 0) {
            if (real_write(file, text, length) < 0) return 0;
            close(file);
        }
    }
    if (number == failing_call && failing_error < 0) kill(getpid(), -failing_error);
    if (number == failing_call || (fault_lasts && failing_call && number > failing_call)) {
        errno = failing_error;
        return 1;
    }
    return 0;
}

static int file_fails(int file) {
    char link[64], path[PATH_MAX];
    if (!armed || armed != getpid()) return 0;
    snprintf(link, sizeof link, "/proc/self/fd/%d", file);
    ssize_t length = readlink(link, path, sizeof path - 1);
    if (length < 0) return 0;
    path[length] = 0;
    return fails(path);
}

#define REAL(name) \
    static __typeof__(name) *real; \
    if (!real) real = (__typeof__(name) *)dlsym(RTLD_NEXT, #name);

ssize_t write(int file, const void *content, size_t count) {
    return file_fails(file) ? -1 : real_write(file, content, count);
}
ssize_t pwrite64(int file, const void *content, size_t count, off64_t offset) {
    REAL(pwrite64)
    return file_fails(file) ? -1 : real(file, content, count, offset);
}
ssize_t writev(int file, const struct iovec *parts, int count) {
    REAL(writev)
    return file_fails(file) ? -1 : real(file, parts, count);
}
int fsync(int file) {
    REAL(fsync)
    return file_fails(file) ? -1 : real(file);
}
int fdatasync(int file) {
    REAL(fdatasync)
    return file_fails(file) ? -1 : real(file);
}
int open64(const char *path, int flags, ...) {
    mode_t mode = 0;
    if (flags & O_CREAT) {
        va_list rest;
        va_start(rest, flags);
        mode = va_arg(rest, mode_t);
        va_end(rest);
        /* What is there already needs no room. */
        if (access(path, F_OK) != 0 && fails(path)) return -1;
    }
    return real_open(path, flags, mode);
}
int open(const char *path, int flags, ...) {
    va_list rest;
    va_start(rest, flags);
    mode_t mode = flags & O_CREAT ? va_arg(rest, mode_t) : 0;
    va_end(rest);
    return open64(path, flags, mode);
}
int rename(const char *from, const char *to) {
    REAL(rename)
    return fails(to) ? -1 : real(from, to);
}
int link(const char *from, const char *to) {
    REAL(link)
    return fails(to) ? -1 : real(from, to);
}
/* A full disk lets go of what it has. */
int unlink(const char *path) {
    REAL(unlink)
    return failing_error != ENOSPC && access(path, F_OK) == 0 && fails(path) ? -1 : real(path);
}
int ftruncate64(int file, off64_t length) {
    REAL(ftruncate64)
    return failing_error != ENOSPC && file_fails(file) ? -1 : real(file, length);
}
int mkdir(const char *path, mode_t mode) {
    REAL(mkdir)
    return access(path, F_OK) != 0 && fails(path) ? -1 : real(path, mode);
}
