package inside

import (
	"fmt"
	"strings"
	"testing"
)

// Of is for Clients alone, and says so.
func TestOfAnythingElse(t *testing.T) {
	defer func() {
		if got := fmt.Sprint(recover()); !strings.Contains(got, "string is no *client.Client") {
			t.Errorf("Of a string panics with %q", got)
		}
	}()
	Of("x")
}
