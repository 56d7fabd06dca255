// SPDX-License-Identifier: GPL-2.0-only
/*
 * A device that refuses to suspend. Linux suspends devices in the reverse order of their detection.
 * So devices that are detected after this module is loaded are suspended and resumed, and earlier
 * ones stay awake. Among the latter is the root file system of vm/run: 9p over virtio does not
 * survive a suspend.
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
