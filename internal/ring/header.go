package ring

import (
	"fmt"
	"strings"
)

// Header is the C header of what this package defines, which client/c has.
func Header() string {
	var b strings.Builder
	b.WriteString("/* kvd_ring.h - rings and messages between a program and its broker. Generated from " +
		"internal/ring: go generate ./internal/ring. */\n#ifndef KVD_RING_H\n#define KVD_RING_H\n" +
		"#include <stdint.h>\n\n")
	constants(&b, "KVD_RING_", []named{{"MAGIC", Magic}, {"MAJOR", Major}, {"MINOR", Minor},
		{"MIN_DEPTH", MinDepth}, {"MAX_DEPTH", MaxDepth}, {"SLOT", SlotSize}, {"MAX_QUEUES", MaxQueues},
		{"SQ_TAIL", offSQTail}, {"SQ_HEAD", offSQHead}, {"BROKER_SLEEPS", offBrokerSleeps}, {"CQ_TAIL", offCQTail},
		{"CQ_HEAD", offCQHead}, {"CLIENT_SLEEPS", offClientSleeps}, {"BROKER_CPU", offBrokerCPU},
		{"CLIENT_CPU", offClientCPU}, {"MAX_MESSAGE", MaxMessage}, {"MAX_FILES", MaxFiles},
		{"MAX_PARTS", MaxParts}, {"CHUNKED", FlagChunked}, {"WITHOUT_LENGTH", WithoutLength}, {"MAX_PIN", MaxPin}})
	b.WriteString(`struct kvd_ring_header {
    uint32_t magic;
    uint16_t major, minor;
    uint32_t depth, zero;
    uint64_t sq_offset, cq_offset, slots_offset, bytes;
};
struct kvd_ring_submission {
    uint8_t op, flags;
    uint16_t key_bytes;
    uint32_t tag, memory, batch;
    uint64_t offset, length, word, ttl_ms;
    uint32_t timeout_ms, value_flags;
    uint64_t zero;
};
struct kvd_ring_completion {
    uint32_t tag;
    uint8_t outcome, code;
    uint16_t flags;
    uint64_t length, version, expires_ms;
    uint32_t crc, region;
    uint64_t offset, valid_until;
    uint32_t value_flags, zero;
};

`)
	constants(&b, "KVD_OP_", []named{{"GET", int(OpGet)}, {"PUT", int(OpPut)}, {"DELETE", int(OpDelete)},
		{"EXISTS", int(OpExists)}, {"TOUCH", int(OpTouch)}, {"INCR", int(OpIncr)}, {"SCAN", int(OpScan)},
		{"DELETE_PREFIX", int(OpDeletePrefix)}, {"GET_RANGE", int(OpGetRange)}, {"VIEW", int(OpView)},
		{"VIEW_RELEASE", int(OpViewRelease)}, {"PIN", int(OpPin)}, {"UNPIN", int(OpUnpin)}, {"CANCEL", int(OpCancel)},
		{"NOP", int(OpNop)}, {"PUT_BEGIN", int(OpPutBegin)}, {"PUT_APPEND", int(OpPutAppend)},
		{"PUT_COMMIT", int(OpPutCommit)}, {"PUT_ABORT", int(OpPutAbort)}})
	constants(&b, "KVD_MSG_", []named{{"HELLO", int(KindHello)}, {"QUEUE", int(KindQueue)},
		{"REGISTER", int(KindRegister)}, {"DEREGISTER", int(KindDeregister)}, {"BYE", int(KindBye)},
		{"WELCOME", int(KindWelcome)}, {"QUEUED", int(KindQueued)}, {"DONE", int(KindDone)},
		{"REFUSED", int(KindRefused)}, {"REGION", int(KindRegion)}, {"REGION_GONE", int(KindRegionGone)}})
	b.WriteString("#endif\n")
	return b.String()
}

type named struct {
	name  string
	value int
}

// constants writes an enum.
func constants(b *strings.Builder, prefix string, of []named) {
	b.WriteString("enum {\n")
	for _, n := range of {
		fmt.Fprintf(b, "    %s%s = %d,\n", prefix, n.name, n.value)
	}
	b.WriteString("};\n")
}
