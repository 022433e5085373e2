package dirpb

import "github.com/kvd-project/kvd/internal/identity"

// Rights gives the roles that may call each RPC of the service Directory, by its full name as gRPC
// has it. An RPC that is not there is for nobody. docs/tls.md shows the table.
func Rights() map[string]identity.Roles {
	var (
		memNodes  = identity.RolesOf(identity.MemNode)
		operators = identity.RolesOf(identity.Operator)
		// A memory node runs a janitor of its own.
		janitors = identity.RolesOf(identity.Janitor, identity.MemNode)
		sessions = identity.RolesOf(identity.MemNode, identity.Tier, identity.Gateway, identity.Janitor,
			identity.Archive, identity.Operator, identity.Client)
		owners   = identity.RolesOf(identity.Gateway, identity.Archive, identity.Operator, identity.Client)
		watchers = identity.RolesOf(identity.Directory, identity.MemNode, identity.Janitor, identity.Archive,
			identity.Operator)
	)
	return map[string]identity.Roles{
		Directory_OpenSession_FullMethodName:  sessions,
		Directory_Renew_FullMethodName:        sessions,
		Directory_CloseSession_FullMethodName: sessions,
		Directory_WatchMap_FullMethodName:     sessions, // without a session: those of Status
		Directory_GrantExtent_FullMethodName:  sessions,
		Directory_GrantStatus_FullMethodName:  sessions,
		Directory_SessionState_FullMethodName: sessions,
		Directory_RequestSplit_FullMethodName: sessions,

		Directory_Meet_FullMethodName: identity.RolesOf(identity.Gateway),

		Directory_RegisterNode_FullMethodName:  memNodes, // its reply holds the key that signs tokens
		Directory_Heartbeat_FullMethodName:     memNodes,
		Directory_PublishRegion_FullMethodName: memNodes,
		Directory_LeaveNode_FullMethodName:     memNodes,
		Directory_ReportNode_FullMethodName:    memNodes,

		Directory_KeepVolume_FullMethodName: identity.RolesOf(identity.Tier), // likewise

		Directory_FindWork_FullMethodName:  janitors,
		Directory_ClaimJob_FullMethodName:  janitors,
		Directory_ReportJob_FullMethodName: janitors,

		Directory_StartJob_FullMethodName:        operators,
		Directory_DrainNode_FullMethodName:       operators,
		Directory_RemoveNode_FullMethodName:      operators,
		Directory_GiveUpNode_FullMethodName:      operators,
		Directory_RestartNode_FullMethodName:     operators,
		Directory_GiveUpTier_FullMethodName:      operators,
		Directory_Rebalance_FullMethodName:       operators,
		Directory_CreateNamespace_FullMethodName: operators,
		Directory_SetNamespace_FullMethodName:    operators,
		Directory_DeleteNamespace_FullMethodName: operators,
		Directory_AcceptLoss_FullMethodName:      operators,
		Directory_Status_FullMethodName:          watchers,
		Directory_JoinDirectory_FullMethodName:   identity.RolesOf(identity.Directory),
		Directory_RemoveDirectory_FullMethodName: operators,
		Directory_RotateKey_FullMethodName:       operators,
		Directory_Audit_FullMethodName:           operators,

		Directory_Pages_FullMethodName: identity.RolesOf(identity.Directory, identity.MemNode, identity.Gateway,
			identity.Janitor),

		Directory_WhoAmI_FullMethodName: identity.Every,
		// Of these, everybody but operators must administer the namespace.
		Directory_ShowNamespace_FullMethodName: owners,
		Directory_GrantAccess_FullMethodName:   owners,
		Directory_RevokeAccess_FullMethodName:  owners,
	}
}
