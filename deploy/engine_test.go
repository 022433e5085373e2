package deploy

import (
	"fmt"
	"os"
	"os/exec"
	"slices"
	"strings"
	"testing"
)

// engineRestart restarts and kills the container of a memory node with the only copy of every key, whose memory is
// files in a folder that the machine has on a tmpfs: the keys are there.
func engineRestart(t *testing.T) {
	docker := func(args ...string) string {
		t.Helper()
		return output(t, os.Environ(), append([]string{"docker"}, args...)...)
	}
	c := compose(t)
	prefix := fmt.Sprintf("kvd-path-%d-", os.Getpid())
	var undo [][]string
	t.Cleanup(func() {
		for _, u := range slices.Backward(undo) {
			if out, err := exec.Command("docker", u...).CombinedOutput(); err != nil {
				t.Errorf("docker %v: %v\n%s", u, err, out)
			}
		}
	})
	docker("network", "create", "--internal", prefix+"store")
	undo = append(undo, []string{"network", "rm", prefix + "store"})
	run := func(n string, args ...string) {
		t.Helper()
		s := c.Services[n]
		a := []string{"run", "--detach", "--name", prefix + n, "--network", prefix + "store", "--network-alias", n,
			"--read-only", "--cap-drop", "ALL"}
		for k, v := range s.Environment {
			a = append(a, "--env", k+"="+v)
		}
		docker(slices.Concat(a, []string{"--env", "KVD_DIRECTORY=d1:7400"}, args, []string{s.Image}, s.Command)...)
		undo = append(undo, []string{"rm", "--force", prefix + n})
		waitHealthy(t, prefix+n, s.Healthcheck.Test[1:])
	}
	kvctl := func(args ...string) string {
		t.Helper()
		return strings.TrimSpace(
			docker(append([]string{"run", "--rm", "--network", prefix + "store", "--env", "KVD_DIRECTORY=d1:7400",
				"--env", "KVD_INSECURE=true", "--entrypoint", "/kvctl", "kvd:latest", "--timeout=1m"}, args...)...))
	}
	docker("volume", "create", prefix+"data")
	undo = append(undo, []string{"volume", "rm", prefix + "data"})
	// Not a volume of type tmpfs: the engine unmounts that when the only container that uses it stops. Everybody may
	// make folders here, as in an emptyDir of Kubernetes.
	memory, err := os.MkdirTemp("/dev/shm", "kvd-path-")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(memory) }) // what a container made there is another user's
	if err := os.Chmod(memory, 0o777); err != nil {
		t.Fatal(err)
	}
	run("d1", "--volume", prefix+"data:/data")
	run("m1", "--volume", memory+":/memory", "--env", "KVD_MEMORY_PATH=/memory/m1", "--env", "KVD_MEMORY=256MiB")
	kvctl("namespace", "create", "one", "--replicas=1")
	kvctl("--namespace=one", "put", "hello", "world")
	for _, how := range [][]string{{"restart", "--time", "20", prefix + "m1"}, {"kill", prefix + "m1"}} {
		docker(how...)
		if how[0] == "kill" {
			docker("start", prefix+"m1")
		}
		waitHealthy(t, prefix+"m1", c.Services["m1"].Healthcheck.Test[1:])
		if got := kvctl("--namespace=one", "get", "hello"); got != "world" {
			t.Errorf("after docker %s: %q\n%s", how[0], got, docker("logs", prefix+"m1"))
		}
	}
	if t.Failed() {
		t.Log(docker("logs", prefix+"m1"))
	}
}
