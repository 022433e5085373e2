// The interface from Go to C. libibverbs is loaded at run time: its control
// functions are looked up by name, and its data path is inline functions of
// verbs.h that call through the context. A single call posts a whole chain, another polls a
// batch. No Go pointer is kept by C; numbers stand for addresses.
#ifndef KVD_VERBS_SHIM_H
#define KVD_VERBS_SHIM_H

#include <stddef.h>
#include <stdint.h>
#include <infiniband/verbs.h>

// A work request, 64 bytes.
struct kvd_wr {
	uint64_t id;
	uint64_t local;  // address
	uint64_t remote; // address
	uint64_t compare;
	uint64_t swap;
	uint32_t len;
	uint32_t lkey;
	uint32_t rkey;
	uint8_t op;    // enum ibv_wr_opcode
	uint8_t flags; // enum ibv_send_flags
	uint8_t more;  // SGEs behind local
	uint8_t pad;
	uint64_t pad2;
};

// A work request's SGE beside the one that it names itself.
struct kvd_sge {
	uint64_t addr;
	uint32_t len;
	uint32_t lkey;
};

#define KVD_MORE_SGES 2

// A work completion, 24 bytes.
struct kvd_wc {
	uint64_t id;
	uint32_t qpn;
	uint32_t status; // enum ibv_wc_status
	uint32_t vendor;
	uint32_t recv; // of a receive
};

// How to reach the other queue pair.
struct kvd_path {
	uint8_t gid[16];
	uint32_t qpn;
	uint32_t send_psn; // ours
	uint32_t recv_psn; // theirs
	uint32_t flow_label;
	uint16_t lid;
	uint8_t port;
	uint8_t gid_index;
	uint8_t global;    // use the GRH
	uint8_t mtu;       // enum ibv_mtu
	uint8_t initiator_depth, responder_depth; // READs and atomics under way
	uint8_t timeout, retry, rnr_retry;
	uint8_t traffic_class, hop_limit, sl;
};

struct kvd_device {
	const char *name;
	int iwarp;
	int err; // errno: could not be opened
	struct ibv_device_attr attr;
	struct ibv_port_attr port[8];
	int gids;
};

// All functions return 0 or an errno value, unless said otherwise.
int kvd_load(char *why, size_t n);
struct ibv_device **kvd_list(int *n);
void kvd_free_list(struct ibv_device **l);
// Also fills gids with at most n entries of the adapter's GID tables; out->gids is
// how many there are, or -1 where the library cannot tell.
void kvd_describe(struct ibv_device *d, struct kvd_device *out, struct ibv_gid_entry *gids, int n);
const char *kvd_name(struct ibv_device *d);

int kvd_open(struct ibv_device *d, struct ibv_context **out);
int kvd_close(struct ibv_context *c);
int kvd_alloc_pd(struct ibv_context *c, struct ibv_pd **out);
int kvd_dealloc_pd(struct ibv_pd *pd);
// iova is the first byte's address to others and in scatter-gather elements.
int kvd_reg_mr(struct ibv_pd *pd, uint64_t addr, size_t len, uint64_t iova, int access, struct ibv_mr **out);
int kvd_dereg_mr(struct ibv_mr *mr);

int kvd_create_cq(struct ibv_context *c, int depth, struct ibv_cq **cq, struct ibv_comp_channel **ch);
int kvd_destroy_cq(struct ibv_cq *cq, struct ibv_comp_channel *ch);
int kvd_arm(struct ibv_cq *cq);
// Takes all completion events there are; returns how many, or -errno.
int kvd_events(struct ibv_comp_channel *ch);
// Fills out with at most n completions, spinning for at most spin nanoseconds
// while there is none. Returns how many, or -errno.
int kvd_poll(struct ibv_cq *cq, struct kvd_wc *out, int n, int64_t spin);

int kvd_create_qp(struct ibv_pd *pd, struct ibv_cq *cq, int send_wr, int recv_wr, int sge, int inl, struct ibv_qp **out,
	int *got_inline);
int kvd_init_qp(struct ibv_qp *qp, int port, int pkey_index, int access);
// The P_Key at an index of a port's table.
int kvd_query_pkey(struct ibv_context *c, int port, int index, uint16_t *pkey);
// Moves a queue pair from INIT to RTR, and on to RTS.
int kvd_rtr(struct ibv_qp *qp, const struct kvd_path *p);
int kvd_rts(struct ibv_qp *qp, const struct kvd_path *p);
int kvd_modify(struct ibv_qp *qp, struct ibv_qp_attr *a, int mask);
int kvd_err(struct ibv_qp *qp);
int kvd_destroy_qp(struct ibv_qp *qp);
// Posts n work requests as one chain, built in scratch; *done tells how many were
// taken. more has KVD_MORE_SGES for each, of which wrs[i].more count.
int kvd_post(struct ibv_qp *qp, const struct kvd_wr *wrs, const struct kvd_sge *more, int n, void *scratch, int *done);
size_t kvd_scratch_size(int n);
int kvd_post_recv(struct ibv_qp *qp, uint64_t id, uint64_t addr, uint32_t len, uint32_t lkey);

// Takes one asynchronous event. Returns its type, or -errno.
int kvd_async(struct ibv_context *c);
const char *kvd_event_name(int type);

#endif
