//go:build !verbs || !cgo || !linux

package verbs

import (
	"fmt"

	"github.com/kvd-project/kvd/rdma/driver"
)

// Built tells whether this binary can use RDMA adapters at all.
const Built = false

var errNotBuilt = fmt.Errorf("%w: this binary was built without the tag verbs (make build-verbs, which needs a C "+
	"compiler)", ErrUnavailable)

// Open makes a device of one adapter.
func Open(o Options) (driver.Device, error) {
	if err := o.Validate(); err != nil {
		return nil, fmt.Errorf("verbs: %w", err)
	}
	return nil, errNotBuilt
}

// Devices describes the adapters that the verbs library shows. An error wraps
// ErrUnavailable.
func Devices() ([]DeviceInfo, error) { return nil, errNotBuilt }
