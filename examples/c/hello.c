/* cc hello.c $(pkg-config --cflags --libs kvd) -o hello && ./hello /run/kvd/broker.sock */
#include <kvd.h>
#include <stdio.h>

int main(int argc, char **argv) {
    kvd_error e = {.size = sizeof e};
    kvd_options o = {.size = sizeof o, .path = argc > 1 ? argv[1] : NULL, .namespace_name = argc > 2 ? argv[2] : NULL};
    kvd_client *client;
    char value[100];
    uint64_t n;
    if (kvd_open(&o, &client, &e) || kvd_put(client, "hello", 5, "world", 5, NULL, &e) ||
        kvd_get_into(client, "hello", 5, value, sizeof value, &n, NULL, &e))
        return fprintf(stderr, "%s: %s\n", kvd_code_name(e.code), e.text), 1;
    printf("%.*s\n", (int)n, value);
    return kvd_close(client);
}
