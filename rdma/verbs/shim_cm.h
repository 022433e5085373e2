// The part of the shim that is about librdmacm, the RDMA connection manager. It is loaded when it is needed.
// All calls return at once; an event says how each went.
#ifndef KVD_VERBS_SHIM_CM_H
#define KVD_VERBS_SHIM_CM_H

#include "shim.h"
#include <rdma/rdma_cma.h>

#define KVD_CM_PRIVATE 56 // bytes that InfiniBand's REQ has for its user

// An event, with copies of all that it points to.
struct kvd_cm_event {
	struct rdma_cm_id *id;
	struct rdma_cm_id *listener; // of a request; else NULL
	int type;                    // enum rdma_cm_event_type
	int status;                  // -errno, or a reason of the transport's
	uint8_t initiator_depth, responder_resources;
	uint8_t len; // bytes of data
	uint8_t data[KVD_CM_PRIVATE];
};

// An address of IPv4, mapped, or of IPv6.
struct kvd_cm_addr {
	uint8_t ip[16];
	uint16_t port;
};

// All functions return 0 or an errno value, unless said otherwise.
int kvd_cm_load(char *why, size_t n);
int kvd_cm_open(struct rdma_event_channel **out);
void kvd_cm_close(struct rdma_event_channel *ch);
int kvd_cm_create(struct rdma_event_channel *ch, struct rdma_cm_id **out);
void kvd_cm_destroy(struct rdma_cm_id *id);
// Port 0 picks one, which a->port tells then.
int kvd_cm_listen(struct rdma_cm_id *id, struct kvd_cm_addr *a, int backlog);
int kvd_cm_resolve_addr(struct rdma_cm_id *id, const struct kvd_cm_addr *from, const struct kvd_cm_addr *to, int ms);
int kvd_cm_resolve_route(struct rdma_cm_id *id, int ms);
// Tells whether id belongs to this port of the adapter of c; false before its address is resolved.
int kvd_cm_is_at(struct rdma_cm_id *id, struct ibv_context *c, int port);
int kvd_cm_connect(struct rdma_cm_id *id, const struct ibv_qp *qp, const uint8_t *data, int len, int initiator_depth,
	int responder_resources);
int kvd_cm_accept(struct rdma_cm_id *id, const struct ibv_qp *qp, int initiator_depth, int responder_resources);
int kvd_cm_establish(struct rdma_cm_id *id);
int kvd_cm_reject(struct rdma_cm_id *id);
void kvd_cm_disconnect(struct rdma_cm_id *id);
// Moves qp to state, RTR or RTS, with what id knows of the path, and with p's mtu, depths, timeout and retry.
int kvd_cm_modify(struct rdma_cm_id *id, struct ibv_qp *qp, enum ibv_qp_state state, const struct kvd_path *p);
// Takes one event; EAGAIN: there is none.
int kvd_cm_next(struct rdma_event_channel *ch, struct kvd_cm_event *out);

#endif
