// Package deploy holds what runs the store on machines: an image and a compose
// file, systemd units and sample settings. It has no code of its own; its tests
// start what the files say.
package deploy
