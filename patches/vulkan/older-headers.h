// SPDX-License-Identifier: MIT
#pragma once

// Included before ggml-vulkan's sources. Vulkan headers from before VK_EXT_layer_settings, such as Debian 12's
// (1.3.239), lack three types with which ggml-vulkan passes settings to the validation layer.

#include <vulkan/vulkan_core.h>

#ifndef VK_EXT_layer_settings
#include <vector>

namespace vk {

enum class LayerSettingTypeEXT { eBool32 };

struct LayerSettingEXT {
    const char *        layer;
    const char *        name;
    LayerSettingTypeEXT type;
    uint32_t            n_values;
    const void *        values;
};

struct LayerSettingsCreateInfoEXT {
    LayerSettingsCreateInfoEXT(const std::vector<LayerSettingEXT> & settings) :
        n_settings(uint32_t(settings.size())), settings(settings.data()) {}

    VkStructureType         type = VkStructureType(1000496000);
    const void *            next = nullptr;
    uint32_t                n_settings;
    const LayerSettingEXT * settings;
};

} // namespace vk
#endif
