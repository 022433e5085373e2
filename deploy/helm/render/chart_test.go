// Package render holds the chart in ../kvd against Helm, the types of Kubernetes' API, its Pod Security Standard and
// kvd's own settings, for each file of values in testdata. It has a module of its own, for what it takes to do that.
package render

import (
	"bytes"
	"fmt"
	"io"
	"log"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	certmanager "github.com/cert-manager/cert-manager/pkg/apis/certmanager/v1"
	monitoring "github.com/prometheus-operator/prometheus-operator/pkg/apis/monitoring/v1"
	"helm.sh/helm/v3/pkg/chart"
	"helm.sh/helm/v3/pkg/chart/loader"
	"helm.sh/helm/v3/pkg/chartutil"
	"helm.sh/helm/v3/pkg/engine"
	"helm.sh/helm/v3/pkg/lint"
	"helm.sh/helm/v3/pkg/lint/support"
	apps "k8s.io/api/apps/v1"
	autoscaling "k8s.io/api/autoscaling/v2"
	batch "k8s.io/api/batch/v1"
	core "k8s.io/api/core/v1"
	networking "k8s.io/api/networking/v1"
	policy "k8s.io/api/policy/v1"
	meta "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/util/intstr"
	"k8s.io/apimachinery/pkg/util/validation"
	security "k8s.io/pod-security-admission/api"
	standard "k8s.io/pod-security-admission/policy"
	"sigs.k8s.io/yaml"
)

const chartDir, namespace, release = "../kvd", "store", "kvd"

// kinds makes an object of each kind that the chart has.
var kinds = map[string]func() meta.Object{
	"v1/ConfigMap":                            func() meta.Object { return &core.ConfigMap{} },
	"v1/Pod":                                  func() meta.Object { return &core.Pod{} },
	"v1/Service":                              func() meta.Object { return &core.Service{} },
	"v1/ServiceAccount":                       func() meta.Object { return &core.ServiceAccount{} },
	"apps/v1/DaemonSet":                       func() meta.Object { return &apps.DaemonSet{} },
	"apps/v1/Deployment":                      func() meta.Object { return &apps.Deployment{} },
	"apps/v1/StatefulSet":                     func() meta.Object { return &apps.StatefulSet{} },
	"autoscaling/v2/HorizontalPodAutoscaler":  func() meta.Object { return &autoscaling.HorizontalPodAutoscaler{} },
	"batch/v1/Job":                            func() meta.Object { return &batch.Job{} },
	"cert-manager.io/v1/Certificate":          func() meta.Object { return &certmanager.Certificate{} },
	"cert-manager.io/v1/Issuer":               func() meta.Object { return &certmanager.Issuer{} },
	"monitoring.coreos.com/v1/PodMonitor":     func() meta.Object { return &monitoring.PodMonitor{} },
	"monitoring.coreos.com/v1/PrometheusRule": func() meta.Object { return &monitoring.PrometheusRule{} },
	"networking.k8s.io/v1/NetworkPolicy":      func() meta.Object { return &networking.NetworkPolicy{} },
	"policy/v1/PodDisruptionBudget":           func() meta.Object { return &policy.PodDisruptionBudget{} },
}

func TestMain(m *testing.M) {
	log.SetOutput(io.Discard) // of each symbolic link in a chart
	os.Exit(m.Run())
}

func load(t *testing.T) *chart.Chart {
	t.Helper()
	c, err := loader.Load(chartDir)
	if err != nil {
		t.Fatal(err)
	}
	return c
}

func render(c *chart.Chart, values map[string]any) (map[string]string, error) {
	caps := chartutil.DefaultCapabilities.Copy()
	all, err := chartutil.ToRenderValuesWithSchemaValidation(c, values, chartutil.ReleaseOptions{
		Name: release, Namespace: namespace, IsInstall: true}, caps, false)
	if err != nil {
		return nil, err
	}
	return engine.Render(c, all)
}

// objects decodes what was rendered, and refuses any field that the API does not have, or that is there twice.
func objects(t *testing.T, files map[string]string) (all []meta.Object) {
	t.Helper()
	for _, file := range slices.Sorted(mapKeys(files)) {
		if !strings.HasSuffix(file, ".yaml") {
			continue
		}
		for _, doc := range regexp.MustCompile(`(?m)^---$`).Split(files[file], -1) {
			var head meta.TypeMeta
			if err := yaml.Unmarshal([]byte(doc), &head); err != nil {
				t.Fatalf("%s: %v\n%s", file, err, doc)
			}
			if head == (meta.TypeMeta{}) {
				continue // a comment, or nothing
			}
			make := kinds[head.APIVersion+"/"+head.Kind]
			if make == nil {
				t.Fatalf("%s: no kind %s %s is expected", file, head.APIVersion, head.Kind)
			}
			o := make()
			if err := yaml.UnmarshalStrict([]byte(doc), o); err != nil {
				t.Errorf("%s: %s: %v\n%s", file, head.Kind, err, doc)
			}
			all = append(all, o)
		}
	}
	return all
}

// pods are the pods that objects make, by the name of the object.
func pods(all []meta.Object) map[string]*core.PodTemplateSpec {
	made := map[string]*core.PodTemplateSpec{}
	for _, o := range all {
		switch o := o.(type) {
		case *apps.StatefulSet:
			made[o.Name] = &o.Spec.Template
		case *apps.DaemonSet:
			made[o.Name] = &o.Spec.Template
		case *apps.Deployment:
			made[o.Name] = &o.Spec.Template
		case *batch.Job:
			made[o.Name] = &o.Spec.Template
		case *core.Pod:
			made[o.Name] = &core.PodTemplateSpec{ObjectMeta: o.ObjectMeta, Spec: o.Spec}
		}
	}
	return made
}

// unrestricted says which checks of the standard "restricted" a file of values cannot pass, and why it may not.
var unrestricted = map[string][]string{
	"rdma":      {"host namespaces", "unrestricted capabilities"}, // IPC_LOCK, and the adapter's own network
	"daemonset": {"host namespaces"},                              // on the machine's address
	// The socket is in a folder of the machine that belongs to root.
	"broker": {"restricted volume types", "runAsNonRoot != true", "runAsUser=0"},
}

func TestChart(t *testing.T) {
	names, err := filepath.Glob("testdata/*.yaml")
	if err != nil || len(names) < 8 {
		t.Fatalf("%d files of values, want 8 at least: %v", len(names), err)
	}
	kvd, kvctl := build(t, "kvd"), build(t, "kvctl")
	for _, name := range names {
		t.Run(strings.TrimSuffix(filepath.Base(name), ".yaml"), func(t *testing.T) {
			values, err := chartutil.ReadValuesFile(name)
			if err != nil {
				t.Fatal(err)
			}
			for _, m := range lint.All(chartDir, values, namespace, true).Messages {
				if m.Severity > support.InfoSev {
					t.Errorf("helm lint: %v", m)
				}
			}
			files, err := render(load(t), values)
			if err != nil {
				t.Fatal(err)
			}
			all := objects(t, files)
			checkNames(t, all)
			checkSecurity(t, all)
			checkSelectors(t, all)
			checkSecrets(t, all)
			for name, p := range pods(all) {
				for _, c := range slices.Concat(p.Spec.InitContainers, p.Spec.Containers) {
					checkContainer(t, name, p, c, kvd, kvctl)
				}
			}
		})
	}
}

func checkNames(t *testing.T, all []meta.Object) {
	seen := map[string]bool{}
	for _, o := range all {
		id := fmt.Sprintf("%T %s", o, o.GetName())
		if seen[id] {
			t.Errorf("%s is there twice", id)
		}
		seen[id] = true
		if e := validation.IsDNS1123Subdomain(o.GetName()); len(e) > 0 {
			t.Errorf("%s: %v", id, e)
		}
		if o.GetNamespace() != namespace {
			t.Errorf("%s is in namespace %q", id, o.GetNamespace())
		}
		for k, v := range o.GetLabels() {
			if e := append(validation.IsQualifiedName(k), validation.IsValidLabelValue(v)...); len(e) > 0 {
				t.Errorf("%s: label %s=%s: %v", id, k, v, e)
			}
		}
	}
}

// checkSecurity holds pods against the Pod Security Standard.
func checkSecurity(t *testing.T, all []meta.Object) {
	checks, err := standard.NewEvaluator(standard.DefaultChecks(), nil)
	if err != nil {
		t.Fatal(err)
	}
	_, values, _ := strings.Cut(t.Name(), "/")
	failed := map[string]bool{}
	for name, p := range pods(all) {
		for _, r := range checks.EvaluatePod(
			security.LevelVersion{Level: security.LevelRestricted, Version: security.LatestVersion()}, &p.ObjectMeta,
			&p.Spec) {
			if r.Allowed {
				continue
			}
			excused := false
			for _, id := range unrestricted[values] {
				if (name == "kvd-memnode-a" || name == "kvd-broker") && r.ForbiddenReason == id {
					excused, failed[id] = true, true
				}
			}
			if !excused {
				t.Errorf("pod of %s: %s: %s", name, r.ForbiddenReason, r.ForbiddenDetail)
			}
		}
	}
	for _, id := range unrestricted[values] {
		if !failed[id] {
			t.Errorf("%s is excused, and passes", id)
		}
	}
}

// checkSelectors sees that whatever selects pods selects some, and that ports of services are ports of theirs.
func checkSelectors(t *testing.T, all []meta.Object) {
	made := pods(all)
	chosen := func(what string, s *meta.LabelSelector) (of []*core.PodTemplateSpec) {
		t.Helper()
		selector, err := meta.LabelSelectorAsSelector(s)
		if err != nil {
			t.Errorf("%s: %v", what, err)
			return nil
		}
		for _, p := range made {
			if selector.Matches(labels.Set(p.Labels)) {
				of = append(of, p)
			}
		}
		if len(of) == 0 {
			t.Errorf("%s selects no pod", what)
		}
		return of
	}
	for _, o := range all {
		id := fmt.Sprintf("%T %s", o, o.GetName())
		switch o := o.(type) {
		case *core.Service:
			for _, p := range chosen(id, &meta.LabelSelector{MatchLabels: o.Spec.Selector}) {
				for _, port := range o.Spec.Ports {
					if portOf(p, port.TargetPort) == 0 {
						t.Errorf("%s: port %s: no container has it", id, port.Name)
					}
				}
			}
		case *policy.PodDisruptionBudget:
			chosen(id, o.Spec.Selector)
			checkCountable(t, o, all)
		case *networking.NetworkPolicy:
			if strings.HasSuffix(o.Name, "-broker") || strings.HasSuffix(o.Name, "-janitor") ||
				strings.HasSuffix(o.Name, "-gateway") || strings.HasSuffix(o.Name, "-archive") {
				continue // there may be none
			}
			for _, p := range chosen(id, &o.Spec.PodSelector) {
				for _, rule := range o.Spec.Ingress {
					for _, port := range rule.Ports {
						if portOf(p, *port.Port) == 0 {
							t.Errorf("%s: port %v: no container has it", id, port.Port)
						}
					}
				}
			}
		case *apps.StatefulSet:
			chosen(id, o.Spec.Selector)
		case *apps.DaemonSet:
			chosen(id, o.Spec.Selector)
		case *apps.Deployment:
			chosen(id, o.Spec.Selector)
		case *monitoring.PodMonitor:
			for _, p := range chosen(id, &o.Spec.Selector) {
				if p.Labels["app.kubernetes.io/component"] != "operator" &&
					portOf(p, intstr.FromString(*o.Spec.PodMetricsEndpoints[0].Port)) == 0 {
					t.Errorf("%s: a pod without that port: %v", id, p.Labels)
				}
			}
		}
	}
}

// checkCountable sees that a budget has no pods of a DaemonSet: Kubernetes cannot count those, and would let no pod of
// the budget go.
func checkCountable(t *testing.T, b *policy.PodDisruptionBudget, all []meta.Object) {
	selector, err := meta.LabelSelectorAsSelector(b.Spec.Selector)
	if err != nil {
		t.Fatal(err)
	}
	for _, o := range all {
		if d, ok := o.(*apps.DaemonSet); ok && selector.Matches(labels.Set(d.Spec.Template.Labels)) {
			t.Errorf("budget %s has the pods of DaemonSet %s", b.Name, d.Name)
		}
	}
}

// A job's pods cannot be changed, so values that change them have to make another job.
func TestJobs(t *testing.T) {
	jobs := func(values string) map[string]*batch.Job {
		t.Helper()
		v, err := chartutil.ReadValues([]byte(values))
		if err != nil {
			t.Fatal(err)
		}
		files, err := render(load(t), v)
		if err != nil {
			t.Fatal(err)
		}
		of := map[string]*batch.Job{}
		for _, o := range objects(t, files) {
			if j, ok := o.(*batch.Job); ok {
				of[j.Name] = j
			}
		}
		return of
	}
	before := jobs("{}")
	if again := jobs("gateway: {replicas: 5}"); len(before) != 1 ||
		!maps.EqualFunc(before, again, func(a, b *batch.Job) bool {
			return a.Name == b.Name
		}) {
		t.Errorf("jobs %v and %v, want the same one", slices.Collect(mapKeys(before)), slices.Collect(mapKeys(again)))
	}
	for _, values := range []string{"image: {tag: v2}", "directory: {replicas: 5}", "namespaces: [{name: other}]",
		"tls: {mode: none}", "image: {pullSecrets: [registry]}"} {
		for name := range jobs(values) {
			if before[name] != nil {
				t.Errorf("%s: the job is %s still", values, name)
			}
		}
	}
}

// portOf is 0 if no container has the port.
func portOf(p *core.PodTemplateSpec, want intstr.IntOrString) int32 {
	for _, c := range p.Spec.Containers {
		for _, port := range c.Ports {
			if port.Name == want.StrVal && want.Type == intstr.String || port.ContainerPort == want.IntVal &&
				want.Type == intstr.Int {
				return port.ContainerPort
			}
		}
	}
	return 0
}

// checkSecrets sees that every Secret of a volume is somebody's: a certificate's, or named in the values.
func checkSecrets(t *testing.T, all []meta.Object) {
	there := map[string]bool{"kvd-d": true, "kvd-m": true, "kvd-g": true, "kvd-op": true, "users": true, "word": true,
		"bucket-ca": true}
	for _, o := range all {
		if c, ok := o.(*certmanager.Certificate); ok {
			there[c.Spec.SecretName] = true
			if !c.Spec.IsCA && (len(c.Spec.URIs) != 1 || !regexp.MustCompile(`^spiffe://[^/]+/kvd/(directory|memnode|gateway|janitor|archive|operator|client)/[a-z]+`).MatchString(c.Spec.URIs[0])) {
				t.Errorf("certificate %s: URIs %q", c.Name, c.Spec.URIs)
			}
		}
	}
	for name, p := range pods(all) {
		for _, v := range p.Spec.Volumes {
			if v.Secret != nil && !there[v.Secret.SecretName] {
				t.Errorf("pod of %s: volume %s: no secret %s", name, v.Name, v.Secret.SecretName)
			}
		}
	}
}

func build(t *testing.T, name string) string {
	t.Helper()
	bin := filepath.Join(t.TempDir(), name)
	c := exec.Command("go", "build", "-C", "../../..", "-o", bin, "./cmd/"+name)
	if out, err := c.CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	return bin
}

// checkContainer has kvd itself read the settings of a container, and kvctl those of a job. Every variable must be
// known to them, every mount must have its volume, every file that a setting names must be on one, and probes must ask
// a port that is served.
func checkContainer(t *testing.T, name string, p *core.PodTemplateSpec, c core.Container, kvd, kvctl string) {
	known, volumes := map[string]bool{}, map[string]bool{}
	for _, v := range p.Spec.Volumes {
		volumes[v.Name] = true
	}
	for _, v := range slices.Collect(claims(name)) {
		volumes[v] = true
	}
	var mounted []string
	for _, m := range c.VolumeMounts {
		if mounted = append(mounted, m.MountPath); !volumes[m.Name] {
			t.Errorf("%s/%s: %s is no volume", name, c.Name, m.Name)
		}
	}
	env := []string{}
	pod := strings.NewReplacer("$(POD_NAME)", name+"-0", "$(POD_IP)", "10.1.2.3", "$(NODE_NAME)", "worker-1")
	for _, e := range c.Env {
		if e.ValueFrom == nil {
			env = append(env, e.Name+"="+pod.Replace(e.Value))
			if strings.Contains(pod.Replace(e.Value), "$(") {
				t.Errorf("%s/%s: %s has %s", name, c.Name, e.Name, e.Value)
			}
			if file := e.Value; strings.HasPrefix(file, "/") && !slices.ContainsFunc(mounted, func(m string) bool {
				return file == m || strings.HasPrefix(file, m+"/")
			}) {
				t.Errorf("%s/%s: %s=%s is on no volume", name, c.Name, e.Name, file)
			}
		}
	}
	var cmd *exec.Cmd
	if len(c.Command) > 0 {
		for _, line := range strings.Split(output(t, exec.Command(kvctl, "--help")), "\n") {
			if m := regexp.MustCompile(`--([a-z-]+)`).FindStringSubmatch(line); m != nil {
				known["KVD_"+strings.ToUpper(strings.ReplaceAll(m[1], "-", "_"))] = true
			}
		}
		cmd = exec.Command(kvctl, append(slices.Clone(c.Command[1:]), "--help")...)
	} else {
		for key := range settings(t, kvd, c.Args[0], env) {
			known["KVD_"+strings.ToUpper(strings.NewReplacer("-", "_", ".", "_").Replace(key))] = true
		}
		cmd = exec.Command(kvd, "config", c.Args[0])
	}
	cmd.Env = env
	output(t, cmd)
	for _, e := range env {
		if key, _, _ := strings.Cut(e, "="); !known[key] && strings.HasPrefix(key, "KVD_") { // others are a library's
			t.Errorf("%s/%s: %s is no setting", name, c.Name, key)
		}
	}
	for _, probe := range []*core.Probe{c.StartupProbe, c.LivenessProbe, c.ReadinessProbe} {
		if probe == nil {
			continue
		}
		port := regexp.MustCompile(`127\.0\.0\.1:(\d+)`).FindStringSubmatch(strings.Join(probe.Exec.Command, " "))
		if port == nil || !slices.Contains(env, "KVD_HTTP_LISTEN=0.0.0.0:"+port[1]) {
			t.Errorf("%s/%s: a probe asks %q", name, c.Name, probe.Exec.Command)
		}
	}
}

// claims are the names of volumes that a StatefulSet's claims make.
func claims(name string) func(func(string) bool) {
	return func(yield func(string) bool) {
		if strings.HasSuffix(name, "-directory") {
			yield("data")
		}
	}
}

// settings are the keys that a role has, those of sections with a dot.
func settings(t *testing.T, kvd, role string, env []string) map[string]bool {
	t.Helper()
	c := exec.Command(kvd, "config", role)
	c.Env = env
	var all map[string]any
	if err := yaml.Unmarshal([]byte(output(t, c)), &all); err != nil {
		t.Fatal(err)
	}
	keys := map[string]bool{}
	for k, v := range all {
		if section, ok := v.(map[string]any); ok {
			for inner := range section {
				keys[k+"."+inner] = true
			}
			continue
		}
		keys[k] = true
	}
	return keys
}

func output(t *testing.T, c *exec.Cmd) string {
	t.Helper()
	var out, errs bytes.Buffer
	c.Stdout, c.Stderr = &out, &errs
	if err := c.Run(); err != nil {
		t.Errorf("%v: %v\n%s", c.Args, err, &errs)
	}
	return out.String()
}

// Values that cannot be meant are refused in words.
func TestRefused(t *testing.T) {
	for values, want := range map[string]string{
		"tls: {mode: secrets}":  "tls.secrets.",
		"tls: {serverName: ''}": "tls.serverName",
		"tls: {mode: tls}":      "mode",
		"tls: {mode: none}\ngateway: {redisTLS: {enabled: true}}":         "tls.mode is none",
		"memnode: {memory: 1GB}":                                          "Mi, Gi or Ti",
		"memnode: {pools: [{name: a}, {name: a}]}":                        "two pools are called a",
		"memnode: {pools: [{replicas: 1}]}":                               "name",
		"directory: {replicas: 2}":                                        "replicas",
		"gateway: {redis: {enabled: false}, memcached: {enabled: false}}": "all off",
		"namespaces: [{mode: cache}]":                                     "name",
		"broker: {enabled: true, users: [trainer]}":                       "users",
		"broker: {enabled: true, hostPath: run}":                          "hostPath",
		"archive: {enabled: true}":                                        "archive.to",
		"archive: {enabled: true, to: 'file:///archive'}":                 "archive.claim",
		"archive: {enabled: true, to: 'file:///var', claim: a}":           "file:///var",
		"archive: {enabled: true, to: 'ftp://a/b'}":                       "archive",
		"gatway: {enabled: false}":                                        "gatway",
	} {
		v, err := chartutil.ReadValues([]byte(values))
		if err != nil {
			t.Fatal(err)
		}
		if _, err := render(load(t), v); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v, want %q", values, err, want)
		}
	}
}

// The chart carries the alerts and the dashboard that the store has.
func TestFiles(t *testing.T) {
	for name, of := range map[string]string{"files/alerts.yaml": "../../alerts.yaml",
		"files/grafana.json": "../../grafana/kvd.json"} {
		want, err := os.ReadFile(of)
		if err != nil {
			t.Fatal(err)
		}
		found := false
		for _, f := range load(t).Files {
			found = found || f.Name == name && bytes.Equal(f.Data, want)
		}
		if !found {
			t.Errorf("%s is not %s", name, of)
		}
	}
}

func mapKeys[V any](m map[string]V) func(func(string) bool) {
	return func(yield func(string) bool) {
		for k := range m {
			if !yield(k) {
				return
			}
		}
	}
}
