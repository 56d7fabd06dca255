/*
 * vulkan fd      imports the descriptor of a load into Vulkan (VK_EXT_external_memory_dma_buf)
 * vulkan host    imports a mapping of it (VK_EXT_external_memory_host)
 *
 * The COMMAND of a load. Lets a queue of the device copy the bytes to a Vulkan buffer, and prints them. Copies them
 * again after the CPU has changed the first byte of every page, to check that it is the same memory.
 */
#define _GNU_SOURCE
#include <err.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>
#include <vulkan/vulkan.h>

#define PAGE	4096

static VkDevice device;
static VkQueue queue;
static VkPhysicalDeviceMemoryProperties types;

static void check(VkResult result, const char *what)
{
	if (result != VK_SUCCESS)
		errx(1, "%s: VkResult %d", what, result);
}

static uint64_t number(const char *name)
{
	const char *text = getenv(name);

	if (!text || strchr(text, ','))
		errx(1, "one number in %s is wanted", name);
	return strtoull(text, NULL, 10);
}

static void start(const char *extension)
{
	const char *extensions[] = { "VK_KHR_external_memory_fd", extension };
	const float priority = 1;
	VkApplicationInfo application = { VK_STRUCTURE_TYPE_APPLICATION_INFO, .apiVersion = VK_API_VERSION_1_1 };
	VkInstanceCreateInfo create = { VK_STRUCTURE_TYPE_INSTANCE_CREATE_INFO, .pApplicationInfo = &application };
	VkDeviceQueueCreateInfo queues = {
		VK_STRUCTURE_TYPE_DEVICE_QUEUE_CREATE_INFO, .queueCount = 1, .pQueuePriorities = &priority,
	};
	VkDeviceCreateInfo wanted = {
		VK_STRUCTURE_TYPE_DEVICE_CREATE_INFO, .queueCreateInfoCount = 1, .pQueueCreateInfos = &queues,
		.enabledExtensionCount = 2, .ppEnabledExtensionNames = extensions,
	};
	VkPhysicalDevice physical;
	VkInstance instance;
	uint32_t count = 1;
	VkResult result;

	check(vkCreateInstance(&create, NULL, &instance), "vkCreateInstance");
	result = vkEnumeratePhysicalDevices(instance, &count, &physical);
	if (count != 1 || (result != VK_SUCCESS && result != VK_INCOMPLETE))
		errx(1, "no Vulkan device: VkResult %d", result);
	vkGetPhysicalDeviceMemoryProperties(physical, &types);
	check(vkCreateDevice(physical, &wanted, NULL, &device), "vkCreateDevice");
	vkGetDeviceQueue(device, 0, 0, &queue);
}

/* The first type of memory among `bits` that has `flags`. */
static uint32_t type(uint32_t bits, VkMemoryPropertyFlags flags)
{
	for (uint32_t i = 0; i < types.memoryTypeCount; i++)
		if (bits & 1U << i && (types.memoryTypes[i].propertyFlags & flags) == flags)
			return i;
	errx(1, "no type of memory fits");
}

/* A buffer, bound to memory that is imported with `import`, or allocated. */
static VkBuffer buffer(VkDeviceSize size, VkBufferUsageFlags usage, VkExternalMemoryHandleTypeFlags handles,
		       uint32_t bits, const void *import, VkDeviceMemory *memory)
{
	VkExternalMemoryBufferCreateInfo external = {
		VK_STRUCTURE_TYPE_EXTERNAL_MEMORY_BUFFER_CREATE_INFO, .handleTypes = handles,
	};
	VkBufferCreateInfo create = {
		VK_STRUCTURE_TYPE_BUFFER_CREATE_INFO, .pNext = handles ? &external : NULL, .size = size, .usage = usage,
	};
	VkMemoryAllocateInfo allocate = {
		VK_STRUCTURE_TYPE_MEMORY_ALLOCATE_INFO, .pNext = import, .allocationSize = size,
	};
	VkMemoryRequirements needs;
	VkBuffer made;

	check(vkCreateBuffer(device, &create, NULL, &made), "vkCreateBuffer");
	vkGetBufferMemoryRequirements(device, made, &needs);
	allocate.memoryTypeIndex = type(needs.memoryTypeBits & bits, import ? 0 : VK_MEMORY_PROPERTY_HOST_VISIBLE_BIT |
										   VK_MEMORY_PROPERTY_HOST_COHERENT_BIT);
	if (!import)
		allocate.allocationSize = needs.size;
	check(vkAllocateMemory(device, &allocate, NULL, memory), "vkAllocateMemory");
	check(vkBindBufferMemory(device, made, *memory, 0), "vkBindBufferMemory");
	return made;
}

static VkBuffer import_fd(int fd, VkDeviceSize size)
{
	const VkExternalMemoryHandleTypeFlagBits dma_buf = VK_EXTERNAL_MEMORY_HANDLE_TYPE_DMA_BUF_BIT_EXT;
	PFN_vkGetMemoryFdPropertiesKHR properties_of =
		(PFN_vkGetMemoryFdPropertiesKHR)vkGetDeviceProcAddr(device, "vkGetMemoryFdPropertiesKHR");
	VkMemoryFdPropertiesKHR properties = { VK_STRUCTURE_TYPE_MEMORY_FD_PROPERTIES_KHR };
	/* Vulkan takes ownership of the descriptor. */
	VkImportMemoryFdInfoKHR import = {
		VK_STRUCTURE_TYPE_IMPORT_MEMORY_FD_INFO_KHR, .handleType = dma_buf, .fd = dup(fd),
	};
	VkDeviceMemory memory;

	check(properties_of(device, dma_buf, fd, &properties), "vkGetMemoryFdPropertiesKHR");
	return buffer(size, VK_BUFFER_USAGE_TRANSFER_SRC_BIT, dma_buf, properties.memoryTypeBits, &import, &memory);
}

static VkBuffer import_mapping(void *map, VkDeviceSize size)
{
	const VkExternalMemoryHandleTypeFlagBits host = VK_EXTERNAL_MEMORY_HANDLE_TYPE_HOST_ALLOCATION_BIT_EXT;
	PFN_vkGetMemoryHostPointerPropertiesEXT properties_of =
		(PFN_vkGetMemoryHostPointerPropertiesEXT)vkGetDeviceProcAddr(device,
									     "vkGetMemoryHostPointerPropertiesEXT");
	VkMemoryHostPointerPropertiesEXT properties = { VK_STRUCTURE_TYPE_MEMORY_HOST_POINTER_PROPERTIES_EXT };
	VkImportMemoryHostPointerInfoEXT import = {
		VK_STRUCTURE_TYPE_IMPORT_MEMORY_HOST_POINTER_INFO_EXT, .handleType = host, .pHostPointer = map,
	};
	VkDeviceMemory memory;

	check(properties_of(device, host, map, &properties), "vkGetMemoryHostPointerPropertiesEXT");
	return buffer(size, VK_BUFFER_USAGE_TRANSFER_SRC_BIT, host, properties.memoryTypeBits, &import, &memory);
}

static void copy(VkBuffer from, VkBuffer to, VkBufferCopy region)
{
	VkCommandPoolCreateInfo create = { VK_STRUCTURE_TYPE_COMMAND_POOL_CREATE_INFO };
	VkCommandBufferAllocateInfo allocate = {
		VK_STRUCTURE_TYPE_COMMAND_BUFFER_ALLOCATE_INFO, .level = VK_COMMAND_BUFFER_LEVEL_PRIMARY,
		.commandBufferCount = 1,
	};
	VkCommandBufferBeginInfo begin = { VK_STRUCTURE_TYPE_COMMAND_BUFFER_BEGIN_INFO };
	VkSubmitInfo submit = { VK_STRUCTURE_TYPE_SUBMIT_INFO, .commandBufferCount = 1 };
	VkCommandBuffer commands;

	check(vkCreateCommandPool(device, &create, NULL, &allocate.commandPool), "vkCreateCommandPool");
	check(vkAllocateCommandBuffers(device, &allocate, &commands), "vkAllocateCommandBuffers");
	check(vkBeginCommandBuffer(commands, &begin), "vkBeginCommandBuffer");
	vkCmdCopyBuffer(commands, from, to, 1, &region);
	check(vkEndCommandBuffer(commands), "vkEndCommandBuffer");
	submit.pCommandBuffers = &commands;
	check(vkQueueSubmit(queue, 1, &submit, VK_NULL_HANDLE), "vkQueueSubmit");
	check(vkQueueWaitIdle(queue), "vkQueueWaitIdle");
	vkDestroyCommandPool(device, allocate.commandPool, NULL);
}

int main(int argc, char **argv)
{
	int fd = number("DMAFILE_FD");
	uint64_t offset = number("DMAFILE_OFFSET"), bytes = number("DMAFILE_BYTES");
	uint64_t size = (offset + bytes + PAGE - 1) / PAGE * PAGE;
	int by_fd = argc == 2 && !strcmp(argv[1], "fd");
	VkDeviceMemory memory;
	unsigned char *map;
	VkBuffer from, to;
	void *seen;

	if (!by_fd && (argc != 2 || strcmp(argv[1], "host")))
		errx(2, "fd or host is wanted");
	start(by_fd ? "VK_EXT_external_memory_dma_buf" : "VK_EXT_external_memory_host");
	map = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
	if (map == MAP_FAILED)
		err(1, "mmap");
	from = by_fd ? import_fd(fd, size) : import_mapping(map, size);
	to = buffer(bytes, VK_BUFFER_USAGE_TRANSFER_DST_BIT, 0, UINT32_MAX, NULL, &memory);
	check(vkMapMemory(device, memory, 0, VK_WHOLE_SIZE, 0, &seen), "vkMapMemory");
	copy(from, to, (VkBufferCopy){ .srcOffset = offset, .size = bytes });
	if (fwrite(seen, 1, bytes, stdout) != bytes || fflush(stdout))
		err(1, "stdout");
	for (uint64_t at = 0; at < bytes; at += PAGE)
		map[offset + at] ^= 0xff;
	copy(from, to, (VkBufferCopy){ .srcOffset = offset, .size = bytes });
	if (memcmp(seen, map + offset, bytes))
		errx(1, "Vulkan does not see what the CPU has written");
	return 0;
}
