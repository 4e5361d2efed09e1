/* For LD_PRELOAD: counts the calls that change what lies below a folder, and lets the n-th one of this process go wrong.
 * Programs that this one starts are not touched. tests/runs/killed_sweep.py arms it. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

enum { KILL = 1, TORN, FAIL_EIO, FAIL_ENOSPC, SHORT };

static atomic_long calls, due_at;
static int kind;
static char root[PATH_MAX];

void fault_arm(const char *folder, long at, int what) {
    kind = what;
    due_at = at;
    calls = 0;
    strncpy(root, folder, sizeof root - 1);
}

long fault_calls(void) { return calls; }

/* Whether this call is the one; kills at once where nothing is to be written before. */
static int due(const char *path) {
    if (!root[0] || strncmp(path, root, strlen(root)) || atomic_fetch_add(&calls, 1) + 1 != due_at) return 0;
    if (kind == KILL) kill(getpid(), SIGKILL);
    return 1;
}

static int due_fd(int fd) {
    char link[64], path[PATH_MAX] = "";
    if (!root[0]) return 0;
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    return readlink(link, path, sizeof path - 1) > 0 && due(path);
}

/* Ends a call that cannot be done by halves: by its error, or by a kill; 0 = carry it out. */
static int refused(int is_due) {
    if (is_due && kind == TORN) kill(getpid(), SIGKILL);
    if (!is_due || kind == SHORT) return 0;
    errno = kind == FAIL_EIO ? EIO : ENOSPC;
    return 1;
}

#define REAL(name) static __typeof__(&name) real; if (!real) real = (__typeof__(&name))dlsym(RTLD_NEXT, #name)

ssize_t write(int fd, const void *buffer, size_t count) {
    REAL(write);
    int is_due = due_fd(fd);
    if (is_due && (kind == TORN || kind == SHORT)) {
        ssize_t written = real(fd, buffer, count > 1 ? count / 2 : count);
        if (kind == TORN) kill(getpid(), SIGKILL);
        return written;
    }
    return refused(is_due) ? -1 : real(fd, buffer, count);
}

int fsync(int fd) {
    REAL(fsync);
    return refused(due_fd(fd)) ? -1 : real(fd);
}

int rename(const char *from, const char *to) {
    REAL(rename);
    return refused(due(to)) ? -1 : real(from, to);
}

int mkdir(const char *path, mode_t mode) {
    REAL(mkdir);
    return refused(due(path)) ? -1 : real(path, mode);
}

#define OPEN(name)                                                                                     \
    int name(const char *path, int flags, ...) {                                                       \
        REAL(name);                                                                                    \
        va_list more;                                                                                  \
        va_start(more, flags);                                                                         \
        mode_t mode = flags & (O_CREAT | O_TMPFILE) ? va_arg(more, mode_t) : 0;                        \
        va_end(more);                                                                                  \
        return flags & (O_WRONLY | O_RDWR | O_CREAT) && refused(due(path)) ? -1 : real(path, flags, mode); \
    }
OPEN(open)
OPEN(open64)
