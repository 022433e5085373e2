/* abi.c - prints the sizes and offsets that programs are compiled with; test.sh compares them with abi.txt. */
#include "../kvd.h"

#include <stdio.h>

#define SIZE(type) printf("size %s %zu\n", #type, sizeof(type))
#define FIELD(type, field) printf("offset %s.%s %zu\n", #type, #field, offsetof(type, field))

int main(void) {
    printf("abi %d\n", KVD_ABI);
    SIZE(kvd_error);
    FIELD(kvd_error, outcome), FIELD(kvd_error, code), FIELD(kvd_error, os_error), FIELD(kvd_error, text);
    SIZE(kvd_options);
    FIELD(kvd_options, flags), FIELD(kvd_options, path), FIELD(kvd_options, namespace_name), FIELD(kvd_options, secret);
    FIELD(kvd_options, secret_bytes), FIELD(kvd_options, program), FIELD(kvd_options, arena_bytes);
    FIELD(kvd_options, queues), FIELD(kvd_options, depth), FIELD(kvd_options, timeout_ms), FIELD(kvd_options, dial_ms);
    SIZE(kvd_record);
    FIELD(kvd_record, flags), FIELD(kvd_record, length), FIELD(kvd_record, version), FIELD(kvd_record, expires_ms);
    SIZE(kvd_write);
    FIELD(kvd_write, condition), FIELD(kvd_write, version), FIELD(kvd_write, ttl_ms), FIELD(kvd_write, flags);
    FIELD(kvd_write, timeout_ms);
    SIZE(kvd_result);
    FIELD(kvd_result, outcome), FIELD(kvd_result, code), FIELD(kvd_result, flags), FIELD(kvd_result, length);
    FIELD(kvd_result, version), FIELD(kvd_result, expires_ms), FIELD(kvd_result, number);
    SIZE(kvd_part);
    FIELD(kvd_part, length);
    return 0;
}
