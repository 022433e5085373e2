package identity

import (
	"crypto/tls"
	"crypto/x509"
	"fmt"
	"slices"
	"strings"

	"github.com/spiffe/go-spiffe/v2/spiffeid"
)

const (
	// GroupPrefix begins the name of a group where an identity may stand as well.
	GroupPrefix = "group:"
	// MaxGroups is how many groups a certificate may name.
	MaxGroups = 16
)

// GroupsOf are the groups of a certificate that has been verified, sorted: the organizations (O) of its
// subject. Names have the bounds of identities' names, are printable and have no slash; an error
// matches ErrUnidentified.
func GroupsOf(c *x509.Certificate) ([]string, error) {
	fail := func(format string, args ...any) ([]string, error) {
		return nil, fmt.Errorf("%w: %s (subject %.128q)", ErrUnidentified, fmt.Sprintf(format, args...), c.Subject)
	}
	groups := slices.Clone(c.Subject.Organization)
	if len(groups) > MaxGroups {
		return fail("%d organizations, which are groups, want at most %d", len(groups), MaxGroups)
	}
	for _, g := range groups {
		if err := checkName(g); err != nil {
			return fail("organization, which is a group, %v", err)
		}
	}
	slices.Sort(groups)
	return slices.Compact(groups), nil
}

// GroupsOfConnection are GroupsOf the peer of a TLS connection whose handshake is done.
func GroupsOfConnection(cs *tls.ConnectionState) ([]string, error) {
	if len(cs.VerifiedChains) == 0 || len(cs.VerifiedChains[0]) == 0 {
		return nil, ErrNoCertificate
	}
	return GroupsOf(cs.VerifiedChains[0][0])
}

// CheckWho accepts whoever may stand in an access list: an identity as String gives it, or group:NAME.
func CheckWho(who string) error {
	const want = "want spiffe://TRUST-DOMAIN/kvd/ROLE/NAME, ROLE/NAME of a certificate without a SPIFFE id, or " +
		"group:NAME"
	if group, ok := strings.CutPrefix(who, GroupPrefix); ok {
		if err := checkName(group); err != nil {
			return fmt.Errorf("%.160q: the name of a group %w", who, err)
		}
		return nil
	}
	if strings.Contains(who, "://") {
		id, err := spiffeid.FromString(who)
		if err == nil {
			_, err = Mapping{}.ofID(id)
		}
		if err == nil && id.String() != who {
			err = fmt.Errorf("it is written %s", id)
		}
		if err != nil {
			return fmt.Errorf("%.160q: %w; %s", who, err, want)
		}
		return nil
	}
	role, name, ok := strings.Cut(who, "/")
	if !ok {
		return fmt.Errorf("%.160q is neither an identity nor a group: %s", who, want)
	}
	if _, err := ParseRole(role); err != nil {
		return fmt.Errorf("%.160q: %w; %s", who, err, want)
	}
	if err := checkName(name); err != nil {
		return fmt.Errorf("%.160q: name %w; %s", who, err, want)
	}
	return nil
}
