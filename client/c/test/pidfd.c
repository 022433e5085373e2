/*
 * pidfd.c - for valgrind, which does not know pidfd_open: as a program it runs its arguments with such a descriptor in
 * the variable KVD_SELF; linked with the tests it takes the place of the library's pidfd.c.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <unistd.h>

#ifdef KVD_WITH
int main(int argc, char **argv) {
    char text[16];
    int fd = dup((int)syscall(434, getpid(), 0));
    if (argc < 2 || fd < 0)
        return 2;
    snprintf(text, sizeof text, "%d", fd);
    setenv("KVD_SELF", text, 1);
    execvp(argv[1], argv + 1);
    return 127;
}
#else
int kvd__pidfd(void);

int kvd__pidfd(void) {
    const char *self = getenv("KVD_SELF");
    if (self == NULL) {
        errno = ENOSYS;
        return -1;
    }
    return dup(atoi(self));
}
#endif
