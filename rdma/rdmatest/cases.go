package rdmatest

import (
	"testing"

	"github.com/kvd-project/kvd/rdma"
	"github.com/kvd-project/kvd/rdma/driver"
)

// A capability that a case may need; its name is the field of Caps.
type capability struct {
	name string
	has  func(rdma.Caps) bool
}

var (
	atomics = capability{"AtomicScope", func(c rdma.Caps) bool {
		return c.AtomicScope == driver.AtomicHCA || c.AtomicScope == driver.AtomicCPU
	}}
	atomicThenRead = capability{"AtomicThenRead", func(c rdma.Caps) bool { return c.AtomicThenRead }}
	inline         = capability{"MaxInline", func(c rdma.Caps) bool { return c.MaxInline > 0 }}
	choosesKeys    = capability{"ChoosesKeys", func(c rdma.Caps) bool { return c.ChoosesKeys }}
	functions      = capability{"Functions", func(c rdma.Caps) bool { return c.Functions }}
	sums           = capability{"Sums", func(c rdma.Caps) bool { return c.Sums }}
	maps           = capability{"Maps", func(c rdma.Caps) bool { return c.Maps }}
	reasons        = capability{"not SilentRefusals", func(c rdma.Caps) bool { return !c.SilentRefusals }}
	stopAtMiss     = capability{"StopAtMiss", func(c rdma.Caps) bool { return c.StopAtMiss }}
	synchronous    = capability{"Synchronous", func(c rdma.Caps) bool { return c.Synchronous }}
)

var cases = []struct {
	name  string
	run   func(*testing.T, *Env)
	needs []capability
}{
	// Device and memory.
	{"caps-are-sane-and-constant", capsSane, nil},
	{"alloc-is-zeroed-whole-pages", allocZeroed, nil},
	{"pd-dealloc-with-mr-fails", pdDeallocWithMR, nil},
	{"pd-dealloc-with-qp-fails", pdDeallocWithQP, nil},
	{"device-close-reports-what-is-open", deviceCloseReports, nil},

	// READ and WRITE.
	{"read-and-write-every-size", readWriteSizes, nil},
	{"unaligned-addresses-and-lengths", unaligned, nil},
	{"reads-and-writes-touch-nothing-else", touchNothingElse, nil},
	{"inline-frees-buffer-at-once", inlineReuse, []capability{inline}},
	{"inline-too-long-is-bad-wr", inlineTooLong, nil},
	{"max-msg-is-the-limit", maxMsgLimit, nil},
	{"aligned-units-of-tear-bytes-never-tear", unitsNeverTear, nil},

	{"words-are-whole-up-to-whole-bytes", wordsWhole, nil},

	// Values.
	{"value-of-every-alignment", valueAlignments, nil},
	{"value-of-several-blocks", valueLong, nil},
	{"value-without-a-sum", valueWithoutSum, nil},
	{"value-of-an-unsignaled-wr", valueUnsignaled, nil},
	{"value-has-slack-that-is-thrown-away", valueSlack, nil},
	{"value-is-filled-as-far-as-start-says", valueStartTakesLess, nil},
	{"value-of-which-start-wants-more-is-refused", valueHeadWantsMore, nil},
	{"value-has-the-sum-of-the-bytes-stored", valueSumOfStored, nil},
	{"value-lands-before-local", valueLocalLast, []capability{sums}},
	{"value-out-of-form-is-bad-wr", valueBadWR, nil},
	{"value-detached-before-its-post", valueDetachedBefore, nil},
	{"value-detached-under-way", valueDetachedMeanwhile, nil},
	{"value-under-way-at-a-fence", valueFence, nil},
	{"value-under-way-at-a-deregistration", valueDeregister, nil},
	{"value-outstanding-at-a-close", valueClose, nil},
	{"value-of-a-failed-wr-is-the-callers", valueOfFailedWR, nil},

	// Mappings.
	{"mapping-shows-what-is-written", mapShows, []capability{maps}},
	{"mapping-needs-the-right-to-read", mapRights, []capability{maps}},
	{"mapping-outlives-region-and-connection", mapOutlives, []capability{maps}},

	// Atomics.
	{"cas-swaps-only-if-equal", casBasics, []capability{atomics}},
	{"fetch-add-wraps", fetchAddBasics, []capability{atomics}},
	{"misaligned-atomic-is-bad-wr-and-qp-stays-usable", misalignedAtomic, nil},
	{"contended-cas-sums", contendedCAS, []capability{atomics}},
	{"contended-fetch-add-sums", contendedAdd, []capability{atomics}},
	{"cas-and-fetch-add-share-one-atomic-domain", mixedAtomics, []capability{atomics}},

	// Order.
	{"chain-takes-effect-in-posting-order", chainOrder, []capability{atomics}},
	{"write-is-visible-before-later-cas", writeBeforeCAS, []capability{atomics}},
	{"reads-of-a-chain-are-in-order", readsInOrder, nil},
	{"read-sees-earlier-cas", readAfterCAS, []capability{atomics, atomicThenRead}},
	{"fenced-read-sees-earlier-cas", fencedReadAfterCAS, []capability{atomics}},
	{"fence-behind-work-that-has-no-wc", fenceBehindUnsignaled, []capability{atomics}},
	{"chain-stops-at-a-miss", stopsAtMiss, []capability{atomics, stopAtMiss}},
	{"stop-at-miss-of-what-is-no-cas-is-bad-wr", stopBadWR, nil},
	{"wcs-come-in-posting-order", wcOrder, nil},
	{"qps-share-a-cq", sharedCQ, nil},
	{"synchronous-wcs-are-there-after-post", synchronousWCs, []capability{synchronous}},
	{"unsignaled-success-has-no-wc", unsignaledSuccess, nil},
	{"unsignaled-failure-has-wc", unsignaledFailure, []capability{reasons}},

	// Protection.
	{"last-byte-and-one-past", lastByte, nil},
	{"address-overflow-is-refused", addressOverflow, nil},
	{"unknown-rkey-is-refused", unknownRKey, nil},
	{"revoked-rkey-is-refused", revokedRKey, nil},
	{"adopted-memory-has-its-bytes-and-rkey", adopted, []capability{choosesKeys}},
	{"rkey-of-another-pd-is-refused", foreignPD, nil},
	{"function-region-is-only-read", functionRegion, []capability{functions}},
	{"write-to-region-without-write-is-refused", writeRight, nil},
	{"read-of-region-without-read-is-refused", readRight, []capability{reasons}},
	{"atomic-on-region-without-atomic-is-refused", atomicRight, []capability{atomics}},
	{"local-only-region-is-refused", localOnlyRegion, []capability{reasons}},
	{"connection-limited-to-read", connectionReadOnly, []capability{reasons}},
	{"atomic-past-the-end-is-refused", atomicPastEnd, []capability{atomics}},
	{"wrong-lkey-is-loc-prot-err", wrongLKey, nil},
	{"lkey-of-another-pd-is-loc-prot-err", foreignLKey, nil},
	{"local-outside-mr-is-loc-prot-err", localOutside, nil},

	// Faults.
	{"fault-flushes-what-is-behind", flushAfterFault, []capability{reasons}},
	{"post-after-fault-has-no-effect", postAfterFault, nil},
	{"queue-full-takes-a-prefix", queueFull, nil},
	{"close-with-work-outstanding", closeOutstanding, nil},
	{"close-is-idempotent-and-refuses-posts", closeTwice, nil},

	// Connections.
	{"accept-sees-private-and-remote", acceptSees, nil},
	{"private-at-its-limit", privateLimit, nil},
	{"refusal-reaches-the-dialer", refusal, nil},
	{"dial-nobody-fails", dialNobody, nil},
	{"dial-with-dead-context-fails", dialDeadContext, nil},
	{"fence-stops-everything", fenceStops, nil},
	{"fence-leaves-other-connections-alone", fenceOthers, nil},
	{"fence-is-idempotent", fenceTwice, nil},
	{"closed-is-called-once", closedOnce, nil},
	{"listener-close-fences-every-peer", listenerClose, nil},

	// Values in Arenas: memory that the adapter reaches by itself, if there is one.
	{"arena-value-of-every-alignment", inArena(valueAlignments), nil},
	{"arena-value-of-several-blocks", inArena(valueLong), nil},
	{"arena-value-without-a-sum", inArena(valueWithoutSum), nil},
	{"arena-value-of-an-unsignaled-wr", inArena(valueUnsignaled), nil},
	{"arena-value-has-slack-that-is-thrown-away", inArena(valueSlack), nil},
	{"arena-value-is-filled-as-far-as-start-says", inArena(valueStartTakesLess), nil},
	{"arena-value-of-which-start-wants-more-is-refused", inArena(valueHeadWantsMore), nil},
	{"arena-value-has-the-sum-of-the-bytes-stored", inArena(valueSumOfStored), nil},
	{"arena-value-detached-before-its-post", inArena(valueDetachedBefore), nil},
	{"arena-value-detached-under-way", inArena(valueDetachedMeanwhile), nil},
	{"arena-value-under-way-at-a-fence", inArena(valueFence), nil},
	{"arena-value-under-way-at-a-deregistration", inArena(valueDeregister), nil},
	{"arena-value-outstanding-at-a-close", inArena(valueClose), nil},
	{"arena-value-of-a-failed-wr-is-the-callers", inArena(valueOfFailedWR), nil},
	{"arena-spares-copies-and-registrations", arenaSpares, nil},
	{"arena-with-more-slack-than-is-kept", arenaLongSlack, nil},
	{"arena-refuses-what-it-cannot-have", arenaRefuses, nil},
	{"arena-keeps-its-pd", arenaKeepsPD, nil},
	{"arena-is-for-values-wholly-inside", arenaEdges, nil},
	{"arena-deregister-waits-for-wrs", arenaWaits, nil},
	{"arena-detach-by-who-polls", arenaDetachAlone, nil},
}
