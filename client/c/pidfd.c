/* pidfd.c - the process's descriptor of itself. It is alone here, so that a test can bring another. */
#include "internal.h"

#include <sys/syscall.h>
#include <unistd.h>

#ifndef SYS_pidfd_open
#define SYS_pidfd_open 434
#endif

/* kvd__pidfd returns a new pidfd of this process, or -1 with errno. It closes at exec, as all of them do. */
int kvd__pidfd(void) { return (int)syscall(SYS_pidfd_open, getpid(), 0); }
