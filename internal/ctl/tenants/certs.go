package tenants

import (
	"bytes"
	"crypto/ecdsa"
	"crypto/rsa"
	"crypto/sha256"
	"crypto/x509"
	"errors"
	"fmt"
	"io/fs"
	"math/big"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/google/renameio/v2"
	"github.com/spf13/cobra"

	"github.com/kvd-project/kvd/internal/authority"
	"github.com/kvd-project/kvd/internal/certs"
	"github.com/kvd-project/kvd/internal/ctl"
)

// Files of an authority, in its folder.
const (
	authorityCert = "ca.pem"
	authorityKey  = "ca-key.pem"
	authorityList = "crl.pem"
)

const day = 24 * time.Hour

func (a *commands) certsCommand() *cobra.Command {
	c := &cobra.Command{
		Use:   "certs",
		Short: "Make a private certificate authority, and certificates for a cluster",
		Long: "Make a private certificate authority, and certificates for a cluster. No store is\n" +
			"needed, and nothing is overwritten but the list of revoked certificates. A certificate says in a URI " +
			"who shows it:\n" +
			"spiffe://TRUST-DOMAIN/kvd/ROLE/NAME.",
	}
	c.AddCommand(a.certsInitCommand(), a.certsIssueCommand(), a.certsRevokeCommand(), a.certsShowCommand())
	return c
}

func (a *commands) certsInitCommand() *cobra.Command {
	var dir, trust string
	var days int
	c := &cobra.Command{
		Use:   "init",
		Short: "Make a certificate authority",
		Long: "Make a certificate authority: ca.pem, which every process of the cluster is given as\n" +
			"tls.ca, and ca-key.pem, which certs issue needs and no process. Anybody who has that key can be\n" +
			"anybody to the cluster: keep it where only operators are.",
		Args:        cobra.NoArgs,
		Annotations: map[string]string{ctl.Writes: ""},
		RunE: func(*cobra.Command, []string) error {
			valid, err := validDays(days)
			if err != nil {
				return err
			}
			ca, err := authority.New(trust, a.Now(), valid)
			if err != nil {
				return ctl.UsageError(err)
			}
			key, err := ca.KeyPEM()
			if err != nil {
				return err
			}
			if err := writePair(filepath.Join(dir, authorityCert), ca.CertPEM(), filepath.Join(dir, authorityKey),
				key); err != nil {
				return err
			}
			return a.printIssued(ca.Certificate(), filepath.Join(dir, authorityCert), filepath.Join(dir, authorityKey))
		},
	}
	c.Flags().StringVar(&dir, "dir", ".", "folder of the authority; it is made if there is none")
	c.Flags().StringVar(&trust, "trust-domain", "kvd", "name of the cluster in the identities of its certificates")
	c.Flags().IntVar(&days, "days", 3650, "days for which the authority is valid")
	return c
}

func (a *commands) certsIssueCommand() *cobra.Command {
	var dir, out, role string
	var dns, ips, groups []string
	var days int
	c := &cobra.Command{
		Use:   "issue NAME --role ROLE",
		Short: "Make a certificate and its key",
		Long: "Make a certificate and its key, NAME.pem and NAME-key.pem, signed by the authority in\n" +
			"--dir. To renew one, issue it to another folder and move both files over the old ones:\n" +
			"processes take them anew within seconds.\n\n" +
			"--dns and --ip are the names and addresses by which others call its holder: a directory,\n" +
			"memnode or gateway needs some. A janitor, archive or operator may have some, to serve\n" +
			"metrics or kvctl perf; a client has none.",
		Args:        cobra.ExactArgs(1),
		Annotations: map[string]string{ctl.Writes: ""},
		RunE: func(_ *cobra.Command, args []string) error {
			q := authority.Request{Name: args[0], Role: role, Groups: groups, DNS: dns}
			var err error
			if q.Valid, err = validDays(days); err != nil {
				return err
			}
			for _, s := range ips {
				ip := net.ParseIP(s)
				if ip == nil {
					return ctl.Usagef("--ip %q: want an IP address", s)
				}
				q.IPs = append(q.IPs, ip)
			}
			ca, err := readAuthority(dir)
			if err != nil {
				return err
			}
			cert, certPEM, key, err := ca.Issue(a.Now(), q)
			if err != nil {
				return ctl.UsageError(err)
			}
			if out == "" {
				out = dir
			}
			certFile, keyFile := filepath.Join(out, q.Name+".pem"), filepath.Join(out, q.Name+"-key.pem")
			if err := writePair(certFile, certPEM, keyFile, key); err != nil {
				return err
			}
			return a.printIssued(cert, certFile, keyFile)
		},
	}
	c.Flags().StringVar(&role, "role", "", "what its holder is: "+strings.Join(authority.Roles(), ", "))
	c.Flags().StringSliceVar(&groups, "group", nil, "groups that its holder belongs to, which namespaces can give "+
		"rights to")
	c.Flags().StringSliceVar(&dns, "dns", nil, "names of the holder's host")
	c.Flags().StringSliceVar(&ips, "ip", nil, "addresses of the holder's host")
	c.Flags().IntVar(&days, "days", 365, "days for which the certificate is valid")
	c.Flags().StringVar(&dir, "dir", ".", "folder of the authority")
	c.Flags().StringVar(&out, "out", "", "folder for the certificate and its key (default: that of the authority)")
	_ = c.MarkFlagRequired("role")
	_ = c.RegisterFlagCompletionFunc(
		"role", cobra.FixedCompletions(authority.Roles(), cobra.ShellCompDirectiveNoFileComp))
	return c
}

func (a *commands) certsRevokeCommand() *cobra.Command {
	var dir string
	var serials []string
	var days int
	c := &cobra.Command{
		Use:   "revoke [NAME]...",
		Short: "Make or renew the list of revoked certificates",
		Long: "Make or renew crl.pem, the list of certificates that the authority in --dir has revoked, which\n" +
			"every process is given as tls.crl. NAME.pem there is a certificate to revoke; --serial revokes\n" +
			"one whose file is gone, such as the one that was renewed. Without either the list is\n" +
			"renewed as it is, which it should be before it expires.",
		Annotations: map[string]string{ctl.Writes: ""},
		RunE: func(_ *cobra.Command, args []string) error {
			valid, err := validDays(days)
			if err != nil {
				return err
			}
			var revoke []*big.Int
			for _, s := range serials {
				n, ok := new(big.Int).SetString(s, 16)
				if !ok {
					return ctl.Usagef("--serial %q: want a serial number in hexadecimal, as certs show has it", s)
				}
				revoke = append(revoke, n)
			}
			ca, err := readAuthority(dir)
			if err != nil {
				return err
			}
			for _, name := range args {
				c, err := issuedCert(ca, filepath.Join(dir, name+".pem"))
				if err != nil {
					return err
				}
				revoke = append(revoke, c.SerialNumber)
			}
			file := filepath.Join(dir, authorityList)
			old, err := readList(file)
			if err != nil {
				return err
			}
			list, text, err := ca.Revoke(a.Now(), old, revoke, valid)
			if err != nil {
				return ctl.UsageError(fmt.Errorf("%s: %w", file, err))
			}
			if err := renameio.WriteFile(file, text, 0o644); err != nil {
				return err
			}
			return a.printList(file, list)
		},
	}
	c.Flags().StringSliceVar(&serials, "serial", nil, "serial numbers of certificates to revoke, in hexadecimal")
	c.Flags().IntVar(&days, "days", 365, "days within which the list is to be renewed")
	c.Flags().StringVar(&dir, "dir", ".", "folder of the authority")
	return c
}

// issuedCert reads a certificate that ca has issued.
func issuedCert(ca *authority.Authority, file string) (*x509.Certificate, error) {
	text, err := os.ReadFile(file)
	if err != nil {
		return nil, fmt.Errorf("%w (--serial revokes a certificate whose file is gone)", err)
	}
	all, err := certs.Parse(text)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", file, err)
	}
	if err := all[0].CheckSignatureFrom(ca.Certificate()); err != nil || all[0].IsCA {
		return nil, ctl.Usagef("%s: it is no certificate that this authority has issued", file)
	}
	return all[0], nil
}

// readList reads an authority's list of revoked certificates; nil if there is none yet.
func readList(file string) (*x509.RevocationList, error) {
	text, err := os.ReadFile(file)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	lists, err := certs.ParseLists(text)
	if err == nil && len(lists) != 1 {
		err = fmt.Errorf("%d lists, want the authority's own", len(lists))
	}
	if err != nil {
		return nil, fmt.Errorf("%s: %w", file, err)
	}
	return lists[0], nil
}

func (a *commands) printList(file string, l *x509.RevocationList) error {
	left := l.NextUpdate.Sub(a.Now())
	if a.JSON() {
		revoked := []map[string]any{}
		for _, e := range l.RevokedCertificateEntries {
			revoked = append(revoked, map[string]any{"serial": e.SerialNumber.Text(16),
				"revoked": e.RevocationTime.UTC().Format(time.RFC3339)})
		}
		return a.PrintJSON(map[string]any{"file": file, "issuer": l.Issuer.String(), "number": certs.Number(l),
			"made":    l.ThisUpdate.UTC().Format(time.RFC3339),
			"expires": l.NextUpdate.UTC().Format(time.RFC3339), "seconds_left": int64(left.Seconds()),
			"revoked": revoked})
	}
	state := fmt.Sprintf("%d days left", int(left/day))
	if left < 0 {
		state = "EXPIRED: what it lists stays refused; renew it with kvctl certs revoke"
	}
	fmt.Fprintf(a.Stdout, "%-9s %s\n%-9s %s\n%-9s %s\n%-9s %s to %s, %s\n", "file", ctl.Visible(file), "issuer",
		ctl.Visible(l.Issuer.String()), "number", ctl.Visible(certs.Number(l)),
		"valid", l.ThisUpdate.UTC().Format(time.DateTime), l.NextUpdate.UTC().Format(time.DateTime), state)
	for _, e := range l.RevokedCertificateEntries {
		fmt.Fprintf(a.Stdout, "%-9s %s on %s\n", "revoked", e.SerialNumber.Text(16),
			e.RevocationTime.UTC().Format(time.DateTime))
	}
	_, err := fmt.Fprintln(a.Stdout)
	return err
}

func (a *commands) certsShowCommand() *cobra.Command {
	return &cobra.Command{
		Use:   "show FILE...",
		Short: "Show who certificates are for, and until when they are valid",
		Long: "Show the certificates of PEM files, and lists of revoked ones. Exit status 1 if one of them is\nnot " +
			"valid now.",
		Args: cobra.MinimumNArgs(1),
		RunE: func(_ *cobra.Command, args []string) error {
			valid := true
			for _, file := range args {
				text, err := os.ReadFile(file)
				if err != nil {
					return err
				}
				if bytes.Contains(text, []byte("-----BEGIN X509 CRL-----")) {
					lists, err := certs.ParseLists(text)
					if err != nil {
						return fmt.Errorf("%s: %w", file, err)
					}
					for _, l := range lists {
						valid = valid && !a.Now().After(l.NextUpdate)
						if err := a.printList(file, l); err != nil {
							return err
						}
					}
					continue
				}
				all, err := certs.Parse(text)
				if err != nil {
					return fmt.Errorf("%s: %w", file, err)
				}
				for _, c := range all {
					valid = valid && certs.CheckTime(c, a.Now()) == nil
					if err := a.printCert(file, c); err != nil {
						return err
					}
				}
			}
			if !valid {
				return ctl.Fail(ctl.ExitNo)
			}
			return nil
		},
	}
}

// maxDays keeps a time of expiry within what a certificate can hold.
const maxDays = 100 * 365

func validDays(days int) (time.Duration, error) {
	if days < 1 || days > maxDays {
		return 0, ctl.Usagef("--days %d: want 1 to %d", days, maxDays)
	}
	return time.Duration(days) * day, nil
}

func readAuthority(dir string) (*authority.Authority, error) {
	cert, err := os.ReadFile(filepath.Join(dir, authorityCert))
	if errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("%w (kvctl certs init makes an authority; --dir names its folder)", err)
	}
	if err != nil {
		return nil, err
	}
	key, err := os.ReadFile(filepath.Join(dir, authorityKey))
	if err != nil {
		return nil, err
	}
	ca, err := authority.Parse(cert, key)
	if err != nil {
		return nil, fmt.Errorf("authority in %s: %w", dir, err)
	}
	return ca, nil
}

// writePair makes both files, or none, and overwrites nothing. Only this user can read the key.
func writePair(certFile string, cert []byte, keyFile string, key []byte) error {
	if err := os.MkdirAll(filepath.Dir(certFile), 0o700); err != nil {
		return err
	}
	if err := writeNew(keyFile, key, 0o600); err != nil {
		return err
	}
	if err := writeNew(certFile, cert, 0o644); err != nil {
		return errors.Join(err, os.Remove(keyFile))
	}
	return nil
}

func writeNew(file string, text []byte, mode fs.FileMode) error {
	f, err := os.OpenFile(file, os.O_WRONLY|os.O_CREATE|os.O_EXCL, mode)
	if err != nil {
		return err
	}
	_, err = f.Write(text)
	if err := errors.Join(err, f.Sync(), f.Close()); err != nil {
		return errors.Join(err, os.Remove(file))
	}
	return nil
}

func (a *commands) printIssued(c *x509.Certificate, certFile, keyFile string) error {
	if a.JSON() {
		return a.PrintJSON(map[string]any{"identity": certs.Identity(c), "cert": certFile, "key": keyFile,
			"expires": c.NotAfter.UTC().Format(time.RFC3339)})
	}
	_, err := fmt.Fprintf(a.Stdout, "%s, valid until %s\n%s, and its key %s\n", ctl.Visible(certs.Identity(c)),
		c.NotAfter.UTC().Format(time.DateOnly), ctl.Visible(certFile), ctl.Visible(keyFile))
	return err
}

// uses are the parts of TLS that a certificate may take.
func uses(c *x509.Certificate) (list []string) {
	if c.IsCA {
		list = append(list, "authority")
	}
	for _, u := range []struct {
		usage x509.ExtKeyUsage
		name  string
	}{{x509.ExtKeyUsageServerAuth, "server"}, {x509.ExtKeyUsageClientAuth, "client"}} {
		if slices.Contains(c.ExtKeyUsage, u.usage) || slices.Contains(c.ExtKeyUsage, x509.ExtKeyUsageAny) {
			list = append(list, u.name)
		}
	}
	return list
}

func keyKind(c *x509.Certificate) string {
	switch k := c.PublicKey.(type) {
	case *ecdsa.PublicKey:
		return "ECDSA " + k.Curve.Params().Name
	case *rsa.PublicKey:
		return fmt.Sprintf("RSA %d", k.N.BitLen())
	}
	return c.PublicKeyAlgorithm.String()
}

func (a *commands) printCert(file string, c *x509.Certificate) error {
	var at []string
	at = append(at, c.DNSNames...)
	for _, ip := range c.IPAddresses {
		at = append(at, ip.String())
	}
	left := c.NotAfter.Sub(a.Now())
	sum := fmt.Sprintf("%x", sha256.Sum256(c.Raw))
	if a.JSON() {
		return a.PrintJSON(map[string]any{"file": file, "identity": certs.Identity(c), "subject": c.Subject.String(),
			"issuer": c.Issuer.String(), "groups": append([]string{}, c.Subject.Organization...),
			"hosts": append([]string{}, at...),
			"uses":  append([]string{}, uses(c)...), "key": keyKind(c), "not_before": c.NotBefore.UTC().Format(
				time.RFC3339), "expires": c.NotAfter.UTC().Format(time.RFC3339),
			"seconds_left": int64(left.Seconds()), "serial": c.SerialNumber.Text(16), "sha256": sum})
	}
	state := fmt.Sprintf("%d days left", int(left/day))
	if err := certs.CheckTime(c, a.Now()); err != nil {
		state = "NOT VALID NOW"
	}
	for _, line := range [][2]string{{"file", file}, {"identity", certs.Identity(c)},
		{"groups", strings.Join(c.Subject.Organization, ", ")}, {"hosts", strings.Join(at, ", ")},
		{"uses", strings.Join(uses(c), ", ")},
		{"key", keyKind(c)}, {"issuer", c.Issuer.String()}, {"valid", c.NotBefore.UTC().Format(time.DateTime) + " to " +
			c.NotAfter.UTC().Format(time.DateTime) + ", " + state},
		{"serial", c.SerialNumber.Text(16)}, {"sha256", sum}} {
		if line[1] == "" {
			line[1] = "-"
		}
		if _, err := fmt.Fprintf(a.Stdout, "%-9s %s\n", line[0], ctl.Visible(line[1])); err != nil {
			return err
		}
	}
	_, err := fmt.Fprintln(a.Stdout)
	return err
}
