// SPDX-License-Identifier: GPL-2.0-only
/*
 * A device that refuses to be suspended. Linux suspends devices from the last that it has found to
 * the first: so those that are found after this module is loaded are suspended and resumed, and
 * those that were there before stay awake. Among the latter is the root of vm/run's machines: 9p
 * over virtio does not come back from sleep.
 */
#include <linux/module.h>
#include <linux/platform_device.h>
#include <linux/pm.h>

static int awake_suspend(struct device *dev)
{
	return -EBUSY;
}

static DEFINE_SIMPLE_DEV_PM_OPS(awake_pm_ops, awake_suspend, NULL);

static struct platform_driver awake_driver = {
	.driver = {
		.name = "awake",
		.pm = pm_sleep_ptr(&awake_pm_ops),
	},
};

static struct platform_device *awake;

static int __init awake_init(void)
{
	int err = platform_driver_register(&awake_driver);

	if (err)
		return err;
	awake = platform_device_register_simple("awake", PLATFORM_DEVID_NONE, NULL, 0);
	if (IS_ERR(awake)) {
		platform_driver_unregister(&awake_driver);
		return PTR_ERR(awake);
	}
	return 0;
}

static void __exit awake_exit(void)
{
	platform_device_unregister(awake);
	platform_driver_unregister(&awake_driver);
}

module_init(awake_init);
module_exit(awake_exit);

MODULE_DESCRIPTION("A device that refuses to be suspended");
MODULE_LICENSE("GPL");
